"""docs/front_door.md: every row is run, and the problem in it has the value of the user's own number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import curvescope as cs
from nano import nano

PAGE = (Path(__file__).parent.parent / "docs" / "front_door.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([\w ,:-]+) \| `(cs\..*?)` \| `(.*?)` \|$", PAGE, flags=re.M)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    space: dict[str, Any] = {"gpt": nano(vocab_size=7).float()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
            exec(compile(code, "docs/front_door.md", "exec"), space)
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
    if problem.loss.splits:
        parts = cs.GGN(problem) @ v + cs.FunctionalHessian(problem) @ v
        torch.testing.assert_close(parts, H @ v, rtol=1e-3, atol=1e-4 * float((H @ v).norm()))
