"""Both ends of a spectrum, followed from vectors that were found before."""

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.algorithms.spectra.subspace_tracking import (
    Outside,
    follow_ends,
    ratio_and_stderr,
    search_top,
    track_top,
)
from curvescope.core.seeds import probes


def with_spectrum(values, seed=0):
    n = len(values)
    source = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, generator=source, dtype=torch.float64))[0]
    return Q @ torch.diag(torch.as_tensor(values, dtype=torch.float64)) @ Q.T, Q


def bulk(n, seed=1):
    return 0.3 * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SPECTRA = {
    "outliers": torch.cat([bulk(200), torch.tensor([10.0, 7.0, 5.0, -3.0])]),
    "repeated": torch.cat([bulk(100), torch.tensor([4.0, 4.0, 4.0, -2.0, -2.0])]),
    "positive": torch.cat([bulk(150).abs(), torch.tensor([6.0, 5.0])]),
    "negative": -torch.cat([bulk(150).abs(), torch.tensor([6.0, 5.0])]),
    "semicircle": torch.linspace(-1, 1, 120),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("start", ["random", "near"])
def test_ends_lie_within_their_errors(name, start):
    M, Q = with_spectrum(SPECTRA[name])
    exact = torch.linalg.eigvalsh(M).numpy()
    near = Q[:, [int(SPECTRA[name].argmax())]].T + 0.05 * probes(len(M), 1, seed=3).T / len(M) ** 0.5
    found = follow_ends(cs.Matrix(M, symmetric=True), near if start == "near" else None, top=2, seed=5)
    size = np.abs(exact).max()
    assert found.converged
    assert -1e-9 <= exact[-1] - found.values[0] <= found.errors[0] + 1e-3 * size
    assert -1e-9 <= found.values[-1] - exact[0] <= found.errors[-1] + 0.05 * size
    residuals = [float((M @ v - x * v).norm()) for x, v in zip(found.values, found.vectors, strict=True)]
    np.testing.assert_allclose(found.residuals, residuals, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_small_matrix_is_solved(n):
    M, _ = with_spectrum(torch.arange(n, dtype=torch.float64) - 1)
    found = follow_ends(cs.Matrix(M, symmetric=True), torch.ones(1, n, dtype=torch.float64), top=3)
    assert found.converged
    assert found.values[0] == pytest.approx(n - 2, abs=1e-9)
    assert found.values[-1] == pytest.approx(-1.0, abs=1e-9)


def test_zero_is_zero():
    found = follow_ends(cs.Matrix(torch.zeros(90, 90, dtype=torch.float64), symmetric=True), top=2)
    assert found.converged
    assert found.values[0] == found.errors[0] == 0


def test_a_small_basis_restarts():
    M, _ = with_spectrum(SPECTRA["semicircle"])
    found = follow_ends(cs.Matrix(M, symmetric=True), top=2, max_basis=8, max_products=400, tol=1e-4)
    assert found.converged
    assert found.num_products > 20
    assert found.values[0] == pytest.approx(1.0, abs=1e-3)


def test_the_second_takes_over():
    """A vector that was the first and is not any more does not hide the one that is."""
    values = torch.cat([bulk(200), torch.tensor([5.0, 9.0])])
    M, Q = with_spectrum(values)
    found = follow_ends(cs.Matrix(M, symmetric=True), Q[:, [200]].T, top=2, bottom=False)
    assert found.values[0] == pytest.approx(9.0, rel=0.01)


def test_what_is_near_takes_fewer_products():
    M, _ = with_spectrum(SPECTRA["outliers"])
    cold = follow_ends(cs.Matrix(M, symmetric=True), top=3, tol=1e-4)
    E = with_spectrum(0.02 * bulk(len(M), 9), seed=4)[0]
    warm = follow_ends(cs.Matrix(M + E, symmetric=True), cold.vectors, top=3, tol=1e-4)
    assert warm.num_products < cold.num_products
    assert warm.values[0] == pytest.approx(float(torch.linalg.eigvalsh(M + E)[-1]), rel=0.01)


@pytest.mark.parametrize("seed", range(4))
def test_tracking_takes_few_products_and_keeps_its_error(seed):
    M, _ = with_spectrum(SPECTRA["outliers"])
    before = search_top(cs.Matrix(M, symmetric=True), top=3, seed=seed).vectors
    E = with_spectrum(0.3 * bulk(len(M), 20 + seed), seed=4 + seed)[0]
    pairs = track_top(cs.Matrix(M + E, symmetric=True), before, top=3, tol=0.05)
    assert pairs.converged
    assert pairs.num_products <= 6
    top = float(torch.linalg.eigvalsh(M + E)[-1])
    assert -1e-9 <= top - pairs.values[0] <= pairs.errors[0] <= 0.05 * pairs.values[0]


def test_tracking_with_too_few_products_says_so():
    M, _ = with_spectrum(SPECTRA["semicircle"])
    start = probes(len(M), 1, seed=3).T
    pairs = track_top(cs.Matrix(M, symmetric=True), start, tol=1e-3, max_products=4)
    assert not pairs.converged
    assert pairs.num_products == 4
    assert pairs.errors[0] >= 1 - pairs.values[0]  # as far as the residual tells


def test_forms_are_those_of_the_vectors_beside():
    M, _ = with_spectrum(SPECTRA["outliers"])
    X = probes(len(M), 2, seed=8).T
    found = follow_ends(cs.Matrix(M, symmetric=True), include=X)
    expected = [float(x @ M @ x / (x @ x)) for x in X]
    np.testing.assert_allclose(found.forms, expected, rtol=1e-9)


def test_traces_are_exact_inside_and_sampled_outside():
    M, _ = with_spectrum(SPECTRA["outliers"])
    op = cs.Matrix(M, symmetric=True)
    subspace = follow_ends(op, top=3).subspace
    X = probes(len(M), 300, seed=11)
    blocks = [slice(0, 30), slice(30, 120), slice(120, len(M))]
    exact, samples = Outside(subspace).block_samples(X, M @ X, blocks)
    stderr = samples.std(axis=0, ddof=1) / np.sqrt(300)
    expected = [float(M[rows, rows].diagonal().sum()) for rows in blocks]
    assert (np.abs(exact + samples.mean(axis=0) - expected) < 4 * stderr).all()
    plain = torch.stack([(X[rows] * (M @ X)[rows]).sum(0) for rows in blocks]).sum(0).numpy()
    assert samples.sum(axis=1).std() < 0.5 * plain.std()


def test_ratio_of_norms():
    A, _ = with_spectrum(SPECTRA["outliers"])
    B = with_spectrum(bulk(len(A), 5), seed=6)[0]
    X = probes(len(A), 200, seed=2)
    value, stderr = ratio_and_stderr(B @ X, A @ X)
    assert abs(value - float(B.norm() / A.norm())) < 4 * stderr
    assert np.isnan(ratio_and_stderr(X, 0 * X)[0])


def test_a_search_stops_when_it_is_told():
    M, _ = with_spectrum(SPECTRA["semicircle"])
    asked = iter([False, False, True])
    found = follow_ends(cs.Matrix(M, symmetric=True), tol=1e-6, stop=lambda: next(asked))
    assert found.num_products == 3
    assert not found.converged
    assert found.errors[0] > 0.01


def test_the_smallest_is_within_its_error_at_the_edge_of_a_bulk():
    values = torch.cat([bulk(300), torch.tensor([10.0])])
    for seed in range(10):
        M, Q = with_spectrum(values, seed)
        inside = Q[:, [int(values.argsort()[5])]].T  # followed by mistake
        found = follow_ends(cs.Matrix(M, symmetric=True), inside, seed=seed)
        assert found.values[-1] - float(values.min()) <= found.errors[-1]


@pytest.mark.parametrize("tol", [0.05, 0.01])
def test_a_direction_that_overtakes_lies_within_the_stated_error(tol):
    n, missed, products = 900, 0, []
    for seed in range(60):
        values = 0.3 * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        values[:4] = torch.tensor([10.0, 9.6 if seed % 2 else 8.0, 5.0, 3.0])
        op = cs.Matrix(torch.diag(values), symmetric=True)
        followed = torch.eye(n, dtype=torch.float64)[1:2]  # the largest eigenvector until now
        found = search_top(op, followed, tol=tol, max_products=20, seed=seed)
        missed += 10 - found.values[0] > found.errors[0]
        assert found.converged
        assert found.values[0] <= 10 + 1e-9
        products.append(found.num_products)
    assert missed <= 2  # one in a hundred is expected at most
    assert np.mean(products) < 12


@pytest.mark.parametrize("max_products", [3, 5, 8])
def test_a_search_that_ends_early_states_a_larger_error(max_products):
    values = torch.cat([bulk(700), torch.tensor([2.0, 1.9, 1.8, 1.7])]).double()
    missed = 0
    for seed in range(40):
        op = cs.Matrix(torch.diag(values), symmetric=True)
        found = search_top(op, tol=0.01, max_products=max_products, seed=seed)
        missed += 2 - found.values[0] > found.errors[0]
        assert found.num_products <= max_products
    assert missed <= 2


def test_an_extended_search_has_the_bound_of_all_its_products():
    values = torch.cat([bulk(700), torch.tensor([2.0, 1.9, 1.8, 1.7])]).double()
    op = cs.Matrix(torch.diag(values), symmetric=True)
    rough = search_top(op, torch.ones(1, len(values), dtype=torch.float64), tol=0.3, seed=4)
    fine = search_top(
        op, torch.ones(1, len(values), dtype=torch.float64), tol=0.01, seed=4, resume=rough.subspace
    )
    both = follow_ends(op, top=2, resume=fine.subspace, upper=fine.upper)
    assert fine.errors[0] < rough.errors[0]
    for found in (rough, fine, both):
        assert 2 - found.values[0] <= found.errors[0] + 1e-9
    assert both.values[-1] == pytest.approx(float(values.min()), abs=0.05)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_top_of_a_small_matrix_is_exact(n):
    M, _ = with_spectrum(torch.arange(n, dtype=torch.float64) - 1)
    found = search_top(cs.Matrix(M, symmetric=True), torch.ones(1, n, dtype=torch.float64), top=3)
    assert found.converged
    assert found.values[0] == pytest.approx(n - 2, abs=1e-9)


def test_the_top_of_zero_is_zero():
    found = search_top(cs.Matrix(torch.zeros(90, 90, dtype=torch.float64), symmetric=True), top=2)
    assert found.converged
    assert found.values[0] == found.errors[0] == 0
