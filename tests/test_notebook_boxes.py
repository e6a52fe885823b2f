"""What notebooks show of models, problems, operators and results of studies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import matplotlib.pyplot as plt
import pytest
import torch

import curvescope as cs
from curvescope.viz.notebook import LIMIT
from synthetic_runs import HOSTILE, Synthetic


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    config = cs.TransformerConfig(vocab_size=7, d_model=4, n_heads=2, n_layers=2, n_ctx=5)
    ids = torch.arange(10).reshape(2, 5) % 7
    return cs.Problem(cs.Transformer(config), (ids, (ids + 1) % 7))


def test_a_model_shows_its_parameters_by_role(problem):
    shown = problem.model._repr_html_()
    assert f"{problem.model.num_parameters:,} parameters" in shown
    assert "L*.W_Q" in shown
    assert "4 × 4" in shown
    assert len(shown) < LIMIT


def test_a_problem_shows_data_and_loss_without_a_pass_over_the_model(problem, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *args, **options: pytest.fail("a pass"))
    shown = problem._repr_html_()
    assert "cross_entropy" in shown
    assert "L*.W_K" in shown


def test_operators_of_a_problem_show_their_blocks_and_parts(problem):
    H = cs.Hessian(problem, "L*.W_[QK]")
    assert "L*.W_K" in H._repr_html_()
    both = (H + cs.GGN(problem, "L*.W_[QK]"))._repr_html_()
    assert "Hessian(64 × 64, float32, cpu)" in both
    assert "GGN(64 × 64, float32, cpu)" in both


def test_names_are_escaped(problem):
    shown = replace(problem.model, name="<b onclick='x'>", notes=("<img src=x>",))._repr_html_()
    assert "<b onclick" not in shown
    assert "<img src=x" not in shown


@dataclass(frozen=True)
class Pictured(Synthetic):
    """One with figures."""

    def figures(self):
        return {name: plt.subplots()[0] for name in ("first", "second")}


def test_the_result_of_a_study_shows_its_opening_headlines_and_first_figure():
    before = plt.get_fignums()
    shown = Pictured()._repr_html_()
    assert plt.get_fignums() == before
    assert "Opening words." in shown
    assert "21,800 ± 1,000" in shown
    assert shown.count("<img") == 1
    assert shown.count("<table") == 1
    assert len(shown) < LIMIT


def test_a_long_table_of_a_result_is_begun():
    shown = Synthetic(columns={"block": [f"block {i}" for i in range(30)]})._repr_html_()
    assert ".tables()[" in shown
    assert "block 5<" in shown
    assert "block 6<" not in shown
    assert "24 more rows" in shown


def test_a_result_without_figures_still_shows_its_words_escaped():
    shown = Synthetic(words=HOSTILE)._repr_html_()
    assert "Opening &lt;/script&gt;" in shown
    assert "<script" not in shown
    assert "<img" not in shown
