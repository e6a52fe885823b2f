"""XDiag: the formula written out, no bias, calibrated errors, and Gaussian probes for every estimator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms_known import Counting, uniform, with_spectrum

from curvescope.algorithms import (
    DiagonalEstimate,
    block_norms,
    block_traces,
    diagonal,
    frobenius_norm,
    spectral_density,
    trace,
)
from curvescope.algorithms import columns as columns_module
from curvescope.algorithms.blocks.probes import own_probes
from curvescope.algorithms.estimates import xdiag
from curvescope.core.errors import UsageError
from curvescope.core.operator import Matrix
from curvescope.core.seeds import generator, probes

DECAYING = np.r_[100.0, 30, 10, 5, 3, uniform(-0.5, 0.5, 35)]
HALVES = {"a": slice(0, 15), "b": slice(15, 40)}


def general(n: int = 30) -> Matrix:
    """Not symmetric."""
    return Matrix(torch.randn(n, n, generator=generator(7), dtype=torch.float64))


def written_out(A: np.ndarray, Omega: np.ndarray, left: tuple[int, ...] = ()) -> np.ndarray:
    """The estimates from each probe that is not left out, with bases made anew: (probes, n)."""
    rows, m = [], Omega.shape[1]
    for i in set(range(m)) - set(left):
        others = [j for j in range(m) if j != i and j not in left]
        Q = np.linalg.qr(A @ Omega[:, others])[0]
        inside = (Q * (A.T @ Q)).sum(axis=1)
        w = Omega[:, i]
        rows.append(inside + w * (A @ w - Q @ (Q.T @ (A @ w))))
    return np.array(rows)


@pytest.mark.parametrize("probe", ["rademacher", "gaussian"])
@pytest.mark.parametrize("op", [with_spectrum(DECAYING), general()], ids=["symmetric", "general"])
def test_xdiag_is_the_formula_written_out(op, probe):
    m, A = 5, op.A.numpy()
    Omega = probes(len(A), m, seed=3, kind=probe).numpy()
    d = written_out(A, Omega)
    without = np.array([written_out(A, Omega, (j,)).mean(axis=0) for j in range(m)])
    jackknife, scatter = (m - 1) * without.var(axis=0), d.var(axis=0, ddof=1) / m
    found = diagonal(op, num_probes=2 * m, method="xdiag", probe=probe, seed=3)
    np.testing.assert_allclose(found.values, d.mean(axis=0), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(found.stderr, np.maximum(jackknife, scatter) ** 0.5, rtol=1e-6)


@pytest.mark.parametrize("probe", ["rademacher", "gaussian"])
def test_xdiag_has_no_bias_and_its_intervals_hold(probe):
    op = with_spectrum(DECAYING)
    right = op.A.diagonal().numpy()
    runs = [diagonal(op, num_probes=16, method="xdiag", probe=probe, seed=seed) for seed in range(64)]
    errors = np.array([run.values.numpy() for run in runs]) - right
    assert (np.abs(errors.mean(axis=0)) < 4.5 * errors.std(axis=0) / 8).all()
    held = [(low.numpy() <= right) & (right <= high.numpy()) for low, high in (run.interval for run in runs)]
    assert np.mean(held) > 0.93
    plain = np.array(
        [diagonal(op, num_probes=16, probe=probe, seed=seed).values.numpy() for seed in range(20)]
    )
    assert errors.std() < 0.2 * (plain - right).std()


def test_xdiag_counts_its_products_and_batches_do_not_matter(monkeypatch, tmp_path):
    op = Counting(with_spectrum(DECAYING))
    whole = diagonal(op, num_probes=13, method="xdiag")
    assert whole.num_products == op.columns == 12
    assert whole.num_samples == 6
    monkeypatch.setattr(columns_module, "MAX_COLUMNS", 2)
    parts = diagonal(op, num_probes=13, method="xdiag")
    np.testing.assert_allclose(parts.values, whole.values, rtol=1e-9)
    again = DiagonalEstimate.load(parts.save(tmp_path))
    np.testing.assert_array_equal(again.interval, parts.interval)


@pytest.mark.parametrize("rank", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_xdiag_of_low_rank_is_exact(rank, dtype):
    op = with_spectrum(np.r_[np.array([5.0, 3, 2, 1])[:rank], np.zeros(60 - rank)], dtype=dtype, psd=True)
    found = diagonal(op, num_probes=16, method="xdiag")
    near = 1e-10 if dtype is torch.float64 else 1e-4
    np.testing.assert_allclose(found.values, op.A.diagonal().clamp(min=0), atol=near)
    assert (found.stderr < near).all()


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_xdiag_at_any_scale(scale):
    op = with_spectrum(DECAYING, dtype=torch.float32)
    right, found = (diagonal(A, num_probes=10, method="xdiag") for A in (op, Matrix(op.A * scale)))
    np.testing.assert_allclose(found.values / scale, right.values, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.stderr / scale, right.stderr, rtol=1e-2, atol=1e-4)


def test_xdiag_with_as_many_probes_as_rows_writes_the_operator_out():
    op = Counting(with_spectrum([3.0, 2, -1]))
    found = diagonal(op, num_probes=6, method="xdiag")
    np.testing.assert_allclose(found.values, op.inner.A.diagonal())
    assert found.num_products == op.columns == 3
    assert not found.stderr.any()


def test_probes_that_leave_the_same_direction_out_are_not_told_apart():
    S = np.array([[1.0, 1.0, 0.0], [0.0, 1e-9, 1.0]])
    g, weight = xdiag._pairs(S / np.linalg.norm(S, axis=0), 2e-16)
    assert weight[0, 1] == weight[1, 0] == weight[0, 0] == 0
    assert weight[0, 2] == pytest.approx(1)
    assert g[0, 1] == pytest.approx(1)


ESTIMATORS = {
    "trace": lambda A, **how: trace(A, num_probes=30, **how).value,
    "block traces": lambda A, **how: block_traces(A, HALVES, num_probes=30, **how).values.sum(),
    "diagonal": lambda A, **how: diagonal(A, num_probes=30, **how).values.sum(),
    "frobenius": lambda A, **how: frobenius_norm(A, num_probes=30, **how).squared,
    "block map": lambda A, **how: block_norms(A, HALVES, num_probes=30, **how).squared.sum(),
    "own trace": lambda A, **how: own_probes(A, num_probes=30, **how).trace,
    "own norm": lambda A, **how: (own_probes(A, num_probes=30, **how).squared_samples).mean(),
    "density": lambda A, **how: spectral_density(A, num_probes=5, num_steps=3, **how).moments[0] * 40,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_gaussian_probes_have_no_bias_and_are_others(name):
    spectrum = uniform(0.5, 1.5, 40)
    op, squares = with_spectrum(spectrum), name in ("frobenius", "block map", "own norm")
    right = (spectrum**2).sum() if squares else spectrum.sum()
    values = [ESTIMATORS[name](op, probe="gaussian", seed=seed) for seed in range(20)]
    assert np.std(values) > 0
    assert abs(np.mean(values) - right) < 4 * np.std(values) / np.sqrt(20)
    assert ESTIMATORS[name](op, seed=0) != values[0]
    with pytest.raises(UsageError, match="expected probe to be one of 'rademacher', 'gaussian'"):
        ESTIMATORS[name](op, probe="sphere")
