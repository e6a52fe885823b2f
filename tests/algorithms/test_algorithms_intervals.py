"""Stated 95 % intervals: how often they hold over 200 seeds, at the ends of the number range, and for psd."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from algorithms_known import uniform, with_spectrum

from curvescope.algorithms import (
    BlockTraces,
    FrobeniusNorm,
    TraceEstimate,
    block_norms,
    block_traces,
    columns,
    diagonal,
    frobenius_norm,
    trace,
)
from curvescope.algorithms.blocks.probes import own_probes
from curvescope.algorithms.estimates.intervals import (
    mean_interval,
    median_interval,
    positive_interval,
    student,
)
from curvescope.core.operator import Matrix
from selection import a_half, some

SEEDS = range(200)
DECAYING = np.r_[10.0, 7, 5, 4, 3, uniform(0, 0.5, 75)]
MIXED = np.r_[DECAYING[:5], -DECAYING[:5] / 2, uniform(-0.5, 0.5, 70)]
SLICES = {"a": slice(0, 30), "b": slice(30, 80)}


def held(low, high, truth) -> float:
    low, high = np.asarray(low), np.asarray(high)
    return float(((low <= truth) & (truth <= high)).mean())


@pytest.mark.parametrize("spectrum", a_half([MIXED, DECAYING], shift=1), ids=["mixed", "psd"])
@pytest.mark.parametrize(
    ("method", "num_probes"),
    some(
        [
            *(("hutchinson", 2), ("hutch++", 6), ("xtrace", 4)),
            *(("hutchinson", 10), ("hutchinson", 4), ("hutchinson", 30)),
            *(("hutch++", 30), ("xtrace", 10), ("xtrace", 30)),
        ],
        3,
    ),
)
def test_intervals_of_traces_hold(method, num_probes, spectrum):
    op = with_spectrum(spectrum, psd=spectrum is DECAYING)
    runs = [trace(op, num_probes=num_probes, method=method, seed=seed) for seed in SEEDS]
    most = 0.995 if num_probes >= 20 else 1.0  # few probes: the interval is a bound, which may hold always
    assert 0.90 <= held([r.low for r in runs], [r.high for r in runs], spectrum.sum()) <= most
    assert all(r.low <= r.value <= r.high for r in runs)


@pytest.mark.parametrize("num_probes", some([2, 10, 4, 30], 2))
@pytest.mark.parametrize("spectrum", a_half([DECAYING, MIXED], shift=0), ids=["psd", "mixed"])
def test_intervals_of_norms_hold(spectrum, num_probes):
    op = with_spectrum(spectrum)
    runs = [frobenius_norm(op, num_probes=num_probes, seed=seed) for seed in SEEDS]
    truth = float(np.linalg.norm(spectrum))
    most = 0.98 if num_probes >= 10 else 1.0
    assert 0.90 <= held([r.low for r in runs], [r.high for r in runs], truth) <= most
    old = np.mean([abs(r.value - truth) <= 2 * r.stderr for r in runs])
    assert num_probes > 4 or old < 0.9  # two standard errors do not do


@pytest.mark.parametrize("num_probes", some([4, 2, 10], 1))
def test_intervals_of_blocks_and_entries_hold(num_probes):
    op = with_spectrum(MIXED)
    A = op.A.numpy()
    traces = [block_traces(op, SLICES, num_probes=num_probes, seed=seed) for seed in SEEDS]
    right = np.array([np.trace(A[s, s]) for s in SLICES.values()])
    most = 0.98 if num_probes >= 10 else 1.0  # few probes: the interval is a bound
    assert 0.92 <= held([r.low for r in traces], [r.high for r in traces], right) <= most
    maps = [block_norms(op, SLICES, num_probes=num_probes, seed=seed) for seed in SEEDS]
    norms = np.array([[np.linalg.norm(A[r, c]) for c in SLICES.values()] for r in SLICES.values()])
    assert 0.92 <= held([r.low for r in maps], [r.high for r in maps], norms) <= most
    entries = [diagonal(op, num_probes=num_probes, seed=seed).interval for seed in SEEDS]
    low, high = np.moveaxis(np.array(entries), 1, 0)
    assert 0.92 <= held(low, high, np.diag(A)) <= (0.98 if num_probes >= 10 else 1.0)


def test_a_psd_operator_has_no_negative_traces():
    """A small block beside large ones: shared probes see noise, and say so; its own do not."""
    G = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    G[:5] *= 1e-2
    op = Matrix(G @ G.T, symmetric=True, psd=True)
    slices = {"small": slice(0, 5), "large": slice(5, 60)}
    right = float((G[:5] ** 2).sum())
    below = 0
    for seed in SEEDS:
        found = block_traces(op, slices, num_probes=4, seed=seed)
        below += found.samples[:, 0].mean() < 0
        assert found.values.min() >= 0
        assert found.low.min() >= 0
        assert found.high[0] > 0
        assert found.noise[0] == 1 or found.low[0] > 0
        assert (diagonal(op, num_probes=2, seed=seed).values >= 0).all()
    assert below > 50  # means that would have been shown
    own = own_probes(Matrix(op.A[:5, :5], symmetric=True, psd=True), num_probes=8)
    assert 0 < own.trace_low < right < own.trace_high < 20 * right


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1e-30), (torch.float32, 1e30), (torch.float64, 1e-200), (torch.float64, 1e200)],
)
def test_any_scale(dtype, scale):
    """Everything at one is found again at the ends of the range of numbers, digit by digit or nearly."""
    op = with_spectrum(MIXED, dtype=torch.float32)
    one = Matrix(op.A.to(dtype), symmetric=True)
    far = Matrix(op.A.to(dtype) * scale, symmetric=True)

    def same(x, y):
        np.testing.assert_allclose(np.asarray(x) / scale, y, rtol=1e-5)

    for estimate in (trace, frobenius_norm):
        x, y = (estimate(A, num_probes=6) for A in (far, one))
        for name in ("value", "stderr", "low", "high"):
            same(getattr(x, name), getattr(y, name))
    x, y = (own_probes(A) for A in (far, one))
    for name in ("trace", "trace_stderr", "norm", "norm_stderr", "norm_low", "norm_high", "trace_low"):
        same(getattr(x, name), getattr(y, name))
    x, y = (block_norms(A, SLICES) for A in (far, one))
    for name in ("frobenius", "stderr", "low", "high"):
        same(getattr(x, name), getattr(y, name))
    x, y = (diagonal(A, num_probes=6) for A in (far, one))
    np.testing.assert_allclose(x.values / scale, y.values, rtol=1e-4, atol=1e-6)
    same(x.stderr, y.stderr)


def test_quantiles_and_ends():
    assert [round(student(d), 2) for d in (1, 2, 3, 10, 10**6)] == [12.71, 4.3, 3.18, 2.23, 1.96]
    assert math.isnan(student(0))
    low, high = mean_interval(np.array([-1.0, 1.0]), np.array([0.1, 0.1]), 10, nonnegative=True)
    np.testing.assert_allclose([low, high], [[0, 1 - 0.2228], [0.2228, 1.2228]], atol=1e-4)
    low, high = positive_interval(np.array([0.0, 2.0]), np.array([0.0, 0.2]), 10)
    h = student(10) * 0.1
    np.testing.assert_allclose([low, high], [[0, 2 * (1 + h / 3) ** -3], [0, 2 * math.exp(h + h * h / 2)]])
    one = trace(with_spectrum(MIXED), num_probes=1)
    assert math.isnan(one.low)
    assert math.isnan(one.high)


def test_results_without_intervals_still_load(tmp_path):
    """Results that were saved before there were intervals."""
    op = with_spectrum(MIXED)
    for found, kind in (
        (trace(op), TraceEstimate),
        (block_traces(op, SLICES), BlockTraces),
        (frobenius_norm(op), FrobeniusNorm),
    ):
        folder = found.save(tmp_path / kind.__name__)
        tree = json.loads((folder / "result.json").read_text())
        for name in ("low", "high", "psd", "lengths"):
            tree["fields"].pop(name, None)
        (folder / "result.json").write_text(json.dumps(tree))
        again = kind.load(folder)
        assert np.array_equal(again.samples, found.samples)
    again = BlockTraces.load(tmp_path / "BlockTraces")
    students = mean_interval(again.values, again.stderr, len(again.samples) - 1)
    np.testing.assert_allclose(again.interval, students)
    assert again.total.low < again.total.value < again.total.high


def test_the_median_is_between_order_statistics():
    source = np.random.default_rng(0)
    for count, k in ((6, 1), (9, 2), (12, 3), (25, 8)):
        values = source.permutation(count).astype(float)
        assert median_interval(values) == (k - 1, count - k)
        held = [
            low <= np.log(2) <= high
            for low, high in (median_interval(source.exponential(size=count)) for _ in range(400))
        ]
        assert np.mean(held) > 0.93
    assert np.isnan(median_interval(np.arange(5.0))).all()
    assert np.isnan(median_interval(np.zeros(0))).all()


def _misleading(kind: str) -> Matrix:
    """Matrices on which the scatter of few samples is often much too small."""
    noise = with_spectrum(uniform(-1, 1, 60)).A
    if kind == "outlier":
        return with_spectrum(np.r_[1000.0, np.ones(59)])
    if kind == "rank 5":
        return with_spectrum(np.r_[np.ones(5), np.zeros(55)])
    A = torch.diag(torch.linspace(1, 2, 60, dtype=torch.float64)) + 1e-3 * noise
    if kind == "pair":
        A[0, 1] = A[1, 0] = 1.0
    return Matrix(A, symmetric=True)


@pytest.mark.parametrize("kind", ["outlier", "pair", "rank 5", "near-diagonal"])
@pytest.mark.parametrize(
    ("method", "num_probes"),
    [
        *(("hutchinson", 4), ("hutch++", 12), ("xtrace", 10), ("Frobenius", 4)),
        *(("xdiag", 4), ("xdiag", 8), ("diagonal", 4), ("diagonal", 8)),
    ],
)
def test_intervals_of_few_probes_hold_where_their_scatter_misleads(kind, method, num_probes):
    """One eigenvalue skews the samples, one pair of entries gives them two values, low rank ties them."""
    op, how = _misleading(kind), {"num_probes": num_probes}
    if method in ("xdiag", "diagonal"):
        how["method"] = "hutchinson" if method == "diagonal" else method
        runs = [diagonal(op, **how, seed=seed) for seed in SEEDS]
        assert all(r.is_bound for r in runs)
        low, high = np.moveaxis(np.array([r.interval for r in runs]), 1, 0)
        truth = op.A.diagonal().numpy()
        if method == "diagonal":  # two probes of XDiag miss the pair in a quarter of the runs
            assert ((low <= truth) & (truth <= high)).mean(axis=0).min() >= 0.90  # of every entry alone
    else:
        estimate = frobenius_norm if method == "Frobenius" else partial(trace, method=method)
        runs = [estimate(op, **how, seed=seed) for seed in SEEDS]
        assert all(r.is_bound for r in runs)
        low, high = [r.low for r in runs], [r.high for r in runs]
        truth = float(op.A.norm() if method == "Frobenius" else op.A.trace())
    assert held(low, high, truth) >= 0.92


@pytest.mark.parametrize("kind", ["outlier", "pair", "rank 5", "near-diagonal"])
@pytest.mark.parametrize("num_probes", [2, 4, 8])
def test_intervals_of_blocks_from_few_probes_hold_where_their_scatter_misleads(kind, num_probes):
    """Of norms and traces of all blocks, their total, and of a block from its own probes."""
    op, slices = _misleading(kind), {"a": slice(0, 20), "b": slice(20, 60)}
    how = [{"num_probes": num_probes, "seed": seed} for seed in SEEDS]
    truth = np.array([[float(op.A[r, c].norm()) for c in slices.values()] for r in slices.values()])
    maps = [block_norms(op, slices, **one) for one in how]
    assert held([r.low for r in maps], [r.high for r in maps], truth) >= 0.92
    right = np.array([float(op.A[rows, rows].trace()) for rows in slices.values()])
    traces = [block_traces(op, slices, **one) for one in how]
    assert held([r.low for r in traces], [r.high for r in traces], right) >= 0.92
    totals = [r.total for r in traces]
    assert held([r.low for r in totals], [r.high for r in totals], float(op.A.trace())) >= 0.92
    assert all(r.is_bound for r in (*maps, *traces))
    own = [own_probes(op, **one) for one in how]
    assert held([r.norm_low for r in own], [r.norm_high for r in own], float(op.A.norm())) >= 0.92
    assert held([r.trace_low for r in own], [r.trace_high for r in own], float(op.A.trace())) >= 0.92


@pytest.mark.parametrize("kind", ["power", "decay", "outlier", "two outliers"])
@pytest.mark.parametrize("num_probes", [6, 8, 10, 12, 16, 20, 24])
def test_xdiag_of_few_probes_holds_for_a_diagonal_matrix(kind, num_probes):
    """Few signs are the same in two rows: 24 % of the entries were missed by six products, 18 % by eight."""
    k = torch.arange(60, dtype=torch.float64)
    values = {"power": 1 / (1 + k) ** 2, "decay": 0.8**k}.get(kind, 0.5 + torch.sin(k) / 2)
    values[0] = 100.0 if "outlier" in kind else values[0]
    values[1] = -60.0 if kind == "two outliers" else values[1]
    op = Matrix(torch.diag(values), symmetric=True)
    runs = [diagonal(op, num_probes=num_probes, method="xdiag", seed=seed) for seed in SEEDS]
    low, high = np.moveaxis(np.array([r.interval for r in runs]), 1, 0)
    rounding = 1e-12 * float(values.abs().max())
    assert held(low - rounding, high + rounding, values.numpy()) >= 0.92


def test_xdiag_of_few_probes_stays_exact_for_low_rank():
    op = with_spectrum(np.r_[4.0, 2.0, 1.0, np.zeros(57)])
    low, high = diagonal(op, num_probes=14, method="xdiag").interval
    assert (high - low).max() < 1e-10


@pytest.mark.parametrize("num_columns", [1, 3])
def test_the_bound_of_a_norm_does_not_depend_on_batching(num_columns, monkeypatch):
    op = with_spectrum(MIXED)
    whole = frobenius_norm(op, num_probes=7)
    monkeypatch.setattr(columns, "columns_at_once", lambda op: num_columns)
    parts = frobenius_norm(op, num_probes=7)
    assert (parts.low, parts.high) == pytest.approx((whole.low, whole.high), rel=1e-12)
