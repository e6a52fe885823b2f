"""The adapter runs curvescope and nothing else: its results are counted, a wrong sign makes tests fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer_suites.harness import UNTOUCHED
from peer_suites.run import SUITES, run_suite, summary, versions

pytestmark = pytest.mark.cross_library

SUITE = """
import torch
from torch import nn
from curvlinops import HessianLinearOperator, hutchinson_trace

def test_hessian_of_a_line():
    model, x, y = nn.Linear(3, 1, bias=False), torch.rand(5, 3), torch.rand(5, 1)
    H = HessianLinearOperator(model, nn.MSELoss(reduction="sum"), list(model.parameters()), [(x, y)])
    assert torch.allclose(H @ torch.eye(3), 2 * x.T @ x, rtol=1e-4)

def test_trace_of_the_identity():
    assert abs(hutchinson_trace(torch.eye(6), num_matvecs=4) - 6) < 1e-5

def test_nothing():
    assert torch.ones(1) == 1
"""


@pytest.mark.parametrize("flip", [False, True])
def test_results_are_ours(flip: bool, tmp_path: Path):
    pytest.importorskip("curvlinops")
    (tmp_path / "test_small.py").write_text(SUITE, encoding="utf-8")
    record = run_suite(tmp_path, "plugin_curvlinops", "test_small.py", [], flip=flip)
    found = {name.partition("::")[2]: test for name, test in record.items()}
    for name in ("test_hessian_of_a_line", "test_trace_of_the_identity"):
        assert found[name]["outcome"] == ("failed" if flip else "passed")
        assert found[name]["results"] > 0
    assert (found["test_nothing"]["outcome"], found["test_nothing"]["reason"]) == ("left out", UNTOUCHED)


def test_the_summary_counts_every_test_once():
    record = {
        "a::one": {"outcome": "passed", "reason": "", "results": 3},
        "a::two": {"outcome": "failed", "reason": "other numbers", "results": 1},
        "a::three": {"outcome": "left out", "reason": "cost", "results": 0},
    }
    name = next(iter(SUITES))
    text = summary({name: record}, versions())
    assert f"| {name} {versions()[SUITES[name][0]]} | 3 | 2 | 1 | 1 | 4 |" in text
    assert "| failed | 1 | two: other numbers |" in text
    assert "| left out | 1 | cost |" in text
