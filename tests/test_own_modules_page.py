"""docs/own_modules.md: its code runs, and every row of its tables has the value of the user's own number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import curvescope as cs
from nano import nano

PAGE = (Path(__file__).parent.parent / "docs" / "own_modules.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([\w ,:-]+) \| `(cs\..*?)` \| `(.*?)` \|$", PAGE, flags=re.M)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    space: dict[str, Any] = {"gpt": nano(vocab_size=7).float()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
            exec(compile(code, "docs/own_modules.md", "exec"), space)
            if "model" in space and "roles" not in space:
                assert {"L1.W_Q", "L1.W_2"} <= set(space["model"].blocks)
                assert "L0 is 1.layers.0" in space["model"].notes[-1]
    return space


def test_all_rows_are_found():
    assert len(ROWS) == PAGE.count("| `cs.") == 19


@pytest.mark.parametrize(("have", "write", "number"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_has_the_value_that_it_says(have: str, write: str, number: str, names: dict[str, Any]):
    with torch.random.fork_rng(devices=[]):
        problem = eval(write, names)
    assert problem.loss_value() == pytest.approx(float(eval(number, names).detach()), rel=1e-5)
    H = cs.Hessian(problem)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(0))
    assert float((H @ v).norm()) > 0
    if problem.loss.has_outputs:
        parts = cs.GGN(problem) @ v + cs.FunctionalHessian(problem) @ v
        torch.testing.assert_close(parts, H @ v, rtol=1e-3, atol=1e-4 * float((H @ v).norm()))


def test_examples_of_roles_and_parameters_select_the_blocks_they_say(names: dict[str, Any]):
    assert list(names["model"].blocks)[:4] == ["E", "L0.W_Q", "L0.W_K", "L0.W_V"]
    blocks = {key: [block.name for block in names[key].space()] for key in ("problem", "everything", "last")}
    assert "0.weight" not in blocks["problem"]
    assert "80 of" in names["problem"].notes[-1]
    assert "0.weight" in blocks["everything"]
    assert blocks["last"][:2] == ["L0.ln2.g", "L1.W_Q"]
    assert names["head"].shape == (32, 32)
    assert float(names["head"].abs().max()) > 0
