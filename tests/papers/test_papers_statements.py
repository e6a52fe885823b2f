"""The table of statements: rules, key rows, and that a wrong claim fails."""

import math

import numpy as np
import pytest

from curvescope.closed_form.bounds import growth
from curvescope.papers.ormaniec2025.histograms import Bars
from curvescope.papers.ormaniec2025.statements import architecture, heads
from curvescope.papers.ormaniec2025.statements import study as statements
from curvescope.papers.ormaniec2025.statements.heads import (
    CORRECTED,
    FAILS,
    HOLDS,
    SLOPE,
    VERDICTS,
    log_slope,
    slope_verdict,
    state,
)

COLUMNS = ["statement", "where", "claimed", "measured", "low", "high", "verdict", "note"]


@pytest.fixture(scope="module")
def result():
    """With fewer heads, networks and points than the quick profile has, to be quicker still.

    The entries of the paper's model, which the tests of the histograms measure, are given.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(statements.NUM_HEADS, "quick", 2)
        patch.setitem(statements.NUM_MODELS, "quick", 1)
        for name in ("SIGMA", "WIDE"):
            patch.setattr(architecture, name, np.logspace(-1, 1, 2))
        patch.setattr(heads, "GRID", np.logspace(-2, 1, 7))
        patch.setattr(architecture, "GRID", np.logspace(-2, 0.7, 5))
        patch.setattr(architecture, "measure", entries)
        return statements.run(statements.Config())


def entries(attention, block, **options):
    """Bars of known entries: with softmax those of W_V are 31.2 times those of W_Q, without 0.8 times."""
    size = {("softmax", "L0.W_V"): 31.2, ("linear", "L0.W_V"): 0.8}.get((attention, block), 1.0)
    sizes = size * np.array([1e-6, 1e-5, 1e-4])
    return Bars(attention, block, sizes, {"H": 1.0}, sizes[::2], np.array([3]))


def row(result, words):
    (found,) = (r for g in result.groups.values() for r in g.rows if r.statement == words)
    return found


def test_every_row_has_numbers_and_a_verdict(result):
    frame = result.tables()["statements"]
    assert list(frame.columns) == COLUMNS
    assert len(frame) > 140
    assert frame["statement"].is_unique
    assert set(frame["verdict"]) <= set(VERDICTS)
    assert FAILS not in set(frame["verdict"])
    for column in ("claimed", "measured", "low", "high"):
        assert np.isfinite(frame[column]).all()
    slack = 1e-12 * frame[["low", "high"]].abs().max(axis=1)
    assert (frame["low"] <= frame["measured"] + slack).all()
    assert (frame["measured"] <= frame["high"] + slack).all()
    assert not (frame["where"] == "").any()


@pytest.mark.parametrize(
    ("words", "claimed", "measured", "verdict"),
    [
        ("‖H_o(Q, Q)‖ grows as σ^6", 6, 6, SLOPE),
        ("‖H_o(Q, V)‖ grows as σ^4", 4, 4, SLOPE),
        ("‖H_o(V, V)‖ grows as σ^2", 2, 2, SLOPE),
        ("‖H_f(Q, Q)‖ grows as σ^5", 5, 5, SLOPE),
        ("‖H_f(Q, K)‖ grows as σ^5 and σ^3", 5, 3, CORRECTED),
        ("‖H_f(Q, V)‖ grows as σ^3", 3, 3, SLOPE),
        ("H_f(V, V) is O(1)", 0, 0, HOLDS),
        ("slope of ‖H_o(Q, Q)‖ at σ²Δ = 12 is -42", -42, -42, HOLDS),
        ("‖H_o(V, V)‖ of centered tokens grows as σ^6", 6, 6, HOLDS),
        ("‖H_o(V, V)‖/‖H_o(Q, Q)‖ goes as σ^-4 with softmax attention", -4, -4, HOLDS),
        ("−λ_min(H)/λ_max(H_o) over W_Q and W_K goes as σ^-3", -3, -3, HOLDS),
        ("−λ_min(H)/λ_max(H_o) over one W_QK goes as σ^-1", -1, -1, HOLDS),
        ("‖H_o(W_Q)‖ of 3 linear-attention layers grows as σ^54", 54, 54, HOLDS),
        ("‖H_f(W_Q)‖ of the earlier of 2 linear-attention layers grows as σ^18", 18, 9, CORRECTED),
        ("‖H_o‖ of every layer of a linear MLP of depth 5 grows as σ^2", 2, 2, HOLDS),
        ("‖H_f(W_V)‖ of the earlier of 3 softmax layers grows as σ^3", 3, 3, HOLDS),
        ("Pre-LN: ‖H_f(W_Q)‖ falls as σ^-1 for large σ", -1, -1, HOLDS),
    ],
)
def test_key_statements(result, words, claimed, measured, verdict):
    found = row(result, words)
    assert found.claimed == claimed
    assert found.measured == pytest.approx(measured, abs=0.02)
    assert found.verdict == verdict


def test_softmax_makes_the_entries_differ(result):
    words = "median |entry| of W_V over that of W_Q, the paper's model with softmax"
    assert row(result, words).measured == pytest.approx(31.2)
    assert row(result, words).verdict == HOLDS
    assert row(result, "the same without softmax: the two become alike").measured == pytest.approx(0.8)


def test_pre_norm_helps_and_does_not_cure(result):
    found = row(result, "Pre-LN is a partial fix: blocks become more similar, but still differ")
    assert found.verdict == HOLDS
    assert not 1 / 1.1 < found.measured < 1.1


@pytest.mark.slow
def test_nothing_fails_in_the_quick_profile():
    frame = statements.run(statements.Config()).tables()["statements"]
    assert FAILS not in set(frame["verdict"])
    assert set(frame["verdict"]) <= set(VERDICTS)


def test_verdicts_follow_from_numbers():
    near, far = np.array([2.0, 2.001]), np.array([[2.0, 1.2]])
    assert slope_verdict(2, near, far, bound_ratio=0.5, tolerance=0.02) == SLOPE
    assert slope_verdict(2, near, far, bound_ratio=1.5, tolerance=0.02) == FAILS
    assert slope_verdict(2, near, near[None], bound_ratio=0.5, tolerance=0.02) == HOLDS
    assert slope_verdict(3, near, far, bound_ratio=0.5, tolerance=0.02) == FAILS
    assert state("", "", 2, [2.0, 2.5], tolerance=0.1).verdict == FAILS
    assert state("", "", 2, [2.0, 2.05], tolerance=0.1).verdict == HOLDS
    assert math.isnan(log_slope(0.0, 1.0))
    assert log_slope(1.0, 1.1**6, 1.1) == pytest.approx(3.0)


def test_a_wrong_table_of_exponents_fails(monkeypatch):
    """The verdict is of the numbers: another claim, and it falls."""
    monkeypatch.setattr(heads, "GRID", np.logspace(-2, 1, 7))
    monkeypatch.setattr(growth, "DATA", growth.DATA_LINEAR)
    verdicts = {r.statement: r.verdict for r in heads.growth_in_data(1).rows}
    assert verdicts["‖H_o(V, V)‖ grows as σ^6"] == FAILS
    assert verdicts["‖H_o(Q, Q)‖ grows as σ^6"] == SLOPE
    assert verdicts["H_f(Q, Q) is O(1)"] == FAILS
    swapped = {1: growth.WEIGHTS_K, 2: growth.WEIGHTS_Q, 3: growth.WEIGHTS_V}
    monkeypatch.setattr(heads, "TABLES", swapped)
    assert FAILS in {r.verdict for r in heads.growth_in_weights(1).rows}


def test_merged_and_classical_curvature_by_hand():
    """The share of negative curvature from an automatic Hessian of the loss itself."""
    import torch

    head = architecture.make_head(3)
    X, B = 0.5 * head.X, architecture.B

    def loss(W_Q, W_K):
        A = torch.softmax(X @ W_Q @ W_K.T @ X.T / 3**0.5, -1)
        F = A @ X @ head.W_V
        return (head.G * (F - F.detach())).sum() + B / 2 * (F - F.detach()).square().sum()

    H = torch.autograd.functional.hessian(loss, (head.W_Q, head.W_K))
    H = torch.cat([torch.cat([b.reshape(12, 12) for b in line], 1) for line in H])
    outer = architecture._matrix(architecture._head(head, "softmax", 0.5), ("Q", "K"), "outer")
    want = float(-torch.linalg.eigvalsh(H)[0] / torch.linalg.eigvalsh(outer)[-1])
    assert architecture._classical(head, 0.5) == pytest.approx(want, rel=1e-9)


def test_figures_draw_what_is_stored(result, tmp_path):
    from curvescope.core.result import Result

    again = Result.load(result.save(tmp_path))
    assert set(again.figures()) == {
        "statements_data", "statements_weights", "statements_softmax", "statements_depth"
    }  # fmt: skip
    assert set(again.figures()) | {"statements"} == set(again.captions())


def test_an_asymptotic_law_is_judged_where_it_is_one():
    small, large = np.array([0.01, 0.02]), np.array([0.01, 3.0])
    assert heads._asymptotic(small, large)[0] == HOLDS
    verdict, note = heads._asymptotic(large, small)
    assert verdict == CORRECTED
    assert "1 of 2 heads, off by up to 3" in note
    assert heads._asymptotic(large, large)[0] == FAILS
