"""docs/activations.md and docs/transformerlens.md: their code runs; tables and points they name are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import curvescope as cs
from curvescope.models.capture.activation_points import find_point
from curvescope.studies.activations import view as of_activations
from curvescope.studies.causal import view as of_causal

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "activations.md").read_text(encoding="utf-8")
LENS = (DOCS / "transformerlens.md").read_text(encoding="utf-8")


def run(page: str) -> dict[str, Any]:
    space: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, flags=re.S):
        exec(compile(code, "docs", "exec"), space)
    return space


def test_the_examples_run():
    space = run(PAGE)
    assert len(space["found"].alphas) == 2


def test_the_tables_it_names_have_captions():
    source = "".join(
        Path(str(words.__file__)).read_text(encoding="utf-8") for words in (of_activations, of_causal)
    )
    names = re.findall(r"`(\w+)\.csv`", PAGE)
    assert len(names) == 4
    for name in names:
        assert f'"{name}": ' in source, name


def test_the_points_it_names_are_there():
    model = cs.load("tiny-gpt")
    names = re.findall(r"`((?:L\d\.[\w.]+|embed|final))`", PAGE)
    assert len(set(names)) > 8
    for name in names:
        assert find_point(model, name).name == name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_hand_over_runs():
    pytest.importorskip("transformer_lens")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        space = run(LENS)
    assert float(space["through_head"].abs().max()) > 0
    model, lens = space["model"], space["lens"]
    assert model.module is lens
    problem, ids = space["problem"], space["ids"][:, :-1]
    _, cache = lens.run_with_cache(ids)
    rows = re.findall(r"^\| (`.+?) \| (`.+?) \|$", LENS, flags=re.M)
    pairs = [
        pair for row in rows for pair in zip(*(re.findall(r"`(.+?)`", cell) for cell in row), strict=True)
    ]
    assert len(pairs) == 8
    for ours, theirs in ((a.replace("3", "1"), b.replace("3", "1")) for a, b in pairs):
        found = problem.activations(problem.batches[0], ours)[ours]
        truth = cache[theirs][:, :, 1] if "hook_z" in theirs else cache[theirs]
        torch.testing.assert_close(found, truth)
