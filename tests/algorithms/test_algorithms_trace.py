"""Traces and diagonals of known operators, within errors that are calibrated."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from algorithms_known import SPECTRA, Counting, uniform, with_spectrum

from curvescope.algorithms import BlockTraces, TraceEstimate, block_traces, diagonal, trace
from curvescope.algorithms import columns as columns_module
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import Matrix
from curvescope.core.seeds import generator, probes
from selection import pairs

METHODS = ["hutchinson", "hutch++", "xtrace"]
DECAYING = np.r_[100.0, 30, 10, 5, 3, uniform(-0.5, 0.5, 75)]


def general(n: int = 60) -> Matrix:
    """Not symmetric."""
    return Matrix(torch.randn(n, n, generator=generator(7), dtype=torch.float64))


@pytest.mark.parametrize(("method", "probe"), pairs(METHODS, ["rademacher", "gaussian"]))
@pytest.mark.parametrize("name", ["outliers", "repeated", "indefinite", "even", "normal"])
def test_trace_is_within_four_standard_errors(name, method, probe):
    op = Counting(with_spectrum(SPECTRA[name]))
    found = trace(op, num_probes=60, method=method, probe=probe)
    assert abs(found.value - SPECTRA[name].sum()) < 4 * found.stderr
    assert found.num_products == op.columns == 60
    assert found.value == pytest.approx(found.samples.mean())


@pytest.mark.parametrize("method", METHODS)
def test_trace_of_an_operator_that_is_not_symmetric(method):
    op = general()
    values = [trace(op, num_probes=24, method=method, seed=seed) for seed in range(60)]
    errors = np.array([found.value - float(op.A.trace()) for found in values])
    bars = np.array([found.stderr for found in values])
    assert abs(errors.mean()) < 4 * errors.std() / np.sqrt(60)  # no bias
    assert 0.7 < (errors / bars).std() < 1.6


CALIBRATED = {"hutchinson": (40, 1.4), "hutch++": (30, 1.4), "xtrace": (40, 1.7)}


@pytest.mark.parametrize(("method", "name"), pairs(METHODS, ["decaying", "flat"], shift=1, every=2))
def test_error_bars_are_calibrated(method, name):
    """Over many seeds the errors divided by the error bars have a standard deviation near one."""
    spectrum = DECAYING if name == "decaying" else np.linspace(-1, 1, 80)
    op, (num_probes, high) = with_spectrum(spectrum), CALIBRATED[method]
    runs = [trace(op, num_probes=num_probes, method=method, seed=seed) for seed in range(120)]
    errors = np.array([run.value - spectrum.sum() for run in runs])
    scores = errors / np.array([run.stderr for run in runs])
    assert 0.7 < scores.std() < high
    assert abs(errors.mean()) < 4 * errors.std() / np.sqrt(120)


def test_sketches_beat_hutchinson_on_outliers():
    op = with_spectrum(DECAYING)
    spread = {
        method: np.std([trace(op, num_probes=30, method=method, seed=seed).value for seed in range(40)])
        for method in METHODS
    }
    assert spread["hutch++"] < 0.2 * spread["hutchinson"]
    assert spread["xtrace"] < 0.2 * spread["hutchinson"]


@pytest.mark.parametrize("method", ["hutch++", "xtrace"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rank", [0, 1, 4])
def test_low_rank_is_exact(method, dtype, rank):
    eigenvalues = np.r_[np.array([5.0, -3, 2, 1])[:rank], np.zeros(100 - rank)]
    found = trace(with_spectrum(eigenvalues, dtype=dtype), num_probes=18, method=method)
    near = 1e-10 if dtype is torch.float64 else 1e-4
    assert found.value == pytest.approx(eigenvalues.sum(), abs=near)
    assert found.stderr < near


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["n = 1", "n = 2", "zero"])
def test_tiny_and_zero(name, method):
    found = trace(with_spectrum(SPECTRA[name]), num_probes=12, method=method)
    assert abs(found.value - SPECTRA[name].sum()) <= 4 * found.stderr + 1e-12


def test_xtrace_leaves_one_out():
    """Each sample is Hutch++ with the sketch of the other probes, applied to the probe left out."""
    from curvescope.core.seeds import probes

    op = general(30)
    found = trace(op, num_probes=10, method="xtrace", seed=3)
    Omega = probes(30, 5, seed=3)
    for i in range(5):
        others = [j for j in range(5) if j != i]
        Q = torch.linalg.qr(op.A @ Omega[:, others])[0]
        outside = Omega[:, i] - Q @ (Q.T @ Omega[:, i])
        expected = (Q.T @ op.A @ Q).trace() + outside @ op.A @ outside
        assert found.samples[i] == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_batches_of_columns_change_nothing(monkeypatch, method):
    op = Counting(with_spectrum(SPECTRA["normal"]))
    whole = trace(op, num_probes=20, method=method)
    monkeypatch.setattr(columns_module, "MAX_COLUMNS", 3)
    op.widest = 0
    parts = trace(op, num_probes=20, method=method)
    assert op.widest == 3
    np.testing.assert_allclose(parts.samples, whole.samples, rtol=1e-10)


def test_more_probes_extend_a_run():
    op = with_spectrum(SPECTRA["normal"])
    few, many = (trace(op, num_probes=p) for p in (5, 20))
    np.testing.assert_allclose(many.samples[:5], few.samples)


@pytest.mark.parametrize("method", METHODS)
def test_float32(method):
    found = trace(with_spectrum(SPECTRA["outliers"], dtype=torch.float32), num_probes=60, method=method)
    assert abs(found.value - SPECTRA["outliers"].sum()) < 4 * found.stderr + 1e-3


def test_block_traces_add_up_and_meet_their_errors():
    op = Counting(with_spectrum(SPECTRA["normal"]))
    slices = {"a": slice(0, 50), "b": slice(50, 120), "c": slice(120, 200)}
    found = block_traces(op, slices, num_probes=40, seed=1)
    assert found.names == ["a", "b", "c"]
    assert op.columns == found.num_products == 40
    for j, rows in enumerate(slices.values()):
        assert abs(found.values[j] - float(op.inner.A[rows, rows].trace())) < 4 * found.stderr[j]
    whole = trace(op, num_probes=40, seed=1)
    np.testing.assert_allclose(found.samples.sum(axis=1), whole.samples)
    assert list(found.to_frame()["block"]) == found.names


def test_block_traces_are_calibrated():
    op = with_spectrum(uniform(-1, 1, 40))
    slices = {"a": slice(0, 10), "b": slice(10, 40)}
    right = np.array([float(op.A[rows, rows].trace()) for rows in slices.values()])
    runs = [block_traces(op, slices, num_probes=10, seed=seed) for seed in range(200)]
    scores = np.array([(run.values - right) / run.stderr for run in runs])
    assert ((scores.std(axis=0) > 0.7) & (scores.std(axis=0) < 1.4)).all()


def test_block_traces_of_the_operators_space(tmp_path):
    op = with_spectrum(SPECTRA["small"])
    op.space = SimpleNamespace(slices={"x": slice(0, 10), "y": slice(10, 30)})
    found = block_traces(op, num_probes=3)
    again = BlockTraces.load(found.save(tmp_path))
    assert again.names == ["x", "y"]
    np.testing.assert_array_equal(again.samples, found.samples)


def test_diagonal_meets_its_errors_and_is_calibrated():
    op = with_spectrum(uniform(-1, 1, 40))
    right = op.A.diagonal().numpy()
    found = diagonal(op, num_probes=400)
    assert (np.abs(found.values - right) < 4 * found.stderr).all()
    runs = [diagonal(op, num_probes=10, seed=seed) for seed in range(200)]
    scores = np.array([(run.values - right) / run.stderr for run in runs])
    assert 0.7 < np.median(scores.std(axis=0)) < 1.4
    assert abs(scores.mean()) < 0.1


def test_diagonal_of_a_diagonal_is_exact(monkeypatch):
    op = Matrix(torch.diag(torch.arange(20, dtype=torch.float32)))
    found = diagonal(op, num_probes=3)
    np.testing.assert_allclose(found.values, np.arange(20))
    np.testing.assert_allclose(found.stderr, 0)
    assert np.isnan(diagonal(op, num_probes=1).stderr).all()


def test_gaussian_diagonals_are_slopes_and_their_intervals_are_exact():
    op = with_spectrum(uniform(0.8, 1.0, 30))  # nearly diagonal: squares of single numbers would be skewed
    A, right = op.A.numpy(), op.A.diagonal()
    found = diagonal(op, num_probes=5, probe="gaussian", seed=2)
    V = probes(30, 5, seed=2, kind="gaussian").numpy()
    slope = (V * (A @ V)).sum(axis=1) / (V**2).sum(axis=1)
    rest = ((A @ V - slope[:, None] * V) ** 2).sum(axis=1)
    np.testing.assert_allclose(found.values, slope, rtol=1e-10)
    np.testing.assert_allclose(found.stderr, np.sqrt(rest / 4 / (V**2).sum(axis=1)), rtol=1e-8)
    runs = [diagonal(op, num_probes=4, probe="gaussian", seed=seed).interval for seed in range(150)]
    held = [(low <= right) & (right <= high) for low, high in runs]
    assert abs(float(torch.stack(held).double().mean()) - 0.95) < 0.015
    exact = diagonal(Matrix(torch.diag(torch.arange(20.0))), num_probes=3, probe="gaussian")
    np.testing.assert_allclose(exact.values, np.arange(20), rtol=1e-6)
    assert np.isnan(diagonal(op, num_probes=1, probe="gaussian").stderr).all()


def test_diagonal_does_not_depend_on_batches(monkeypatch):
    op = general(30)
    whole = diagonal(op, num_probes=20)
    samples = np.stack([diagonal(op, num_probes=j).values * j for j in range(1, 21)])
    samples = np.diff(samples, axis=0, prepend=0)  # each probe's own
    np.testing.assert_allclose(whole.stderr, samples.std(axis=0, ddof=1) / np.sqrt(20), rtol=1e-8)
    monkeypatch.setattr(columns_module, "MAX_COLUMNS", 7)
    parts = diagonal(op, num_probes=20)
    np.testing.assert_allclose(parts.values, whole.values, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(parts.stderr, whole.stderr, rtol=1e-10)


def test_one_probe_does_not_know_its_error(tmp_path):
    found = trace(with_spectrum(SPECTRA["small"]), num_probes=1)
    assert np.isnan(found.stderr)
    assert np.isnan(TraceEstimate.load(found.save(tmp_path)).stderr)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_probes": 0}, "num_probes for hutchinson of at least 1"),
        ({"num_probes": 5, "method": "hutch++"}, r"num_probes for hutch\+\+ of at least 6, got 5"),
        ({"num_probes": 3, "method": "xtrace"}, "num_probes for xtrace of at least 4"),
        ({"method": "exact"}, "expected method to be one of"),
        ({"probe": "sphere"}, "expected probe to be one of 'rademacher', 'gaussian'"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(UsageError, match=text):
        trace(with_spectrum(SPECTRA["small"]), **options)


def test_wrong_operators():
    wide = Matrix(torch.ones(3, 4, dtype=torch.float64))
    for estimator in (trace, diagonal, block_traces):
        with pytest.raises(ShapeError, match="needs a square operator"):
            estimator(wide)
    with pytest.raises(ShapeError, match="at least one row"):
        trace(Matrix(torch.ones(0, 0, dtype=torch.float64)))
    with pytest.raises(UsageError, match="num_probes of at least 1"):
        diagonal(general(), num_probes=0)


def test_as_many_probes_as_rows_are_exact_by_hutch():
    A = Matrix(torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)) + 0.5)
    for seed in range(20):
        found = trace(A, num_probes=6, method="hutch++", seed=seed)
        assert abs(found.value - 7.5) < 1e-12
