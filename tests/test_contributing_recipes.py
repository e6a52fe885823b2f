"""The recipes of CONTRIBUTING.md about operators run as they are printed."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

import curvescope as cs
import oracles
from oracles import relative_error

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def recipe(name: str) -> type[Any]:
    """The class of that name, made by the code block that defines it."""
    blocks = [part.split("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```python\n")[1:]]
    (code,) = (block for block in blocks if f"class {name}(" in block)
    space: dict[str, Any] = {"__name__": __name__}
    code = dedent("  " + code.lstrip(" "))
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), space)
    return space[name]


@pytest.mark.skipif(not PAGE.exists(), reason="only in the repository")
def test_the_operator_is_the_one_of_the_package():
    bench = oracles.bench("wide-heads")
    F = recipe("EmpiricalFisher")(bench.problem)
    right = cs.EmpiricalFisher(bench.problem)
    V = torch.randn(F.shape[1], 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert F.psd
    assert relative_error(F @ V, right @ V) < 1e-14
    some, same = F.block("L0.*"), right.block("L0.*")
    assert relative_error(some @ V[: some.shape[1]], same @ V[: some.shape[1]]) < 1e-14


@pytest.mark.skipif(not PAGE.exists(), reason="only in the repository")
def test_the_form_is_the_one_of_the_package():
    bench = oracles.bench("wide-heads")
    made = recipe("GaussNewton")()

    class Ours(cs.GGN):
        form = made

    G = Ours(bench.problem)
    v = bench.probe()
    for _ in range(3):  # cached, too
        assert relative_error(G @ v, cs.GGN(bench.problem) @ v) < 1e-14
