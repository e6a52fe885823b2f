"""Operators with very many rows and a few large eigenvalues, of which a random vector sees almost nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms_known import Counting, diagonal_operator, low_rank_operator, wanted, with_spectrum

from curvescope.algorithms import eigsh
from curvescope.core.errors import CurvescopeError
from curvescope.core.operator import FunctionOperator, Matrix
from curvescope.core.seeds import generator
from selection import some

ENDS = np.r_[1000.0, 700, 200, 50, 3, -400, -90, -8]
SQUARE = [  # a Latin square of the three, and the whole cube among the slow
    pytest.param(which, k, tol, marks=() if (a + b + c) % 4 == 0 else pytest.mark.slow)
    for a, which in enumerate(["LA", "SA", "LM", "BE"])
    for b, k in enumerate([1, 2, 5, 10])
    for c, tol in enumerate([1e-1, 1e-2, 1e-3, 1e-5])
]


def check_claim(found, eigenvalues: np.ndarray, k: int, which: str) -> None:
    """What is called converged is right, up to the tolerance."""
    scale = np.abs(eigenvalues).max()
    right = wanted(eigenvalues, k, which)
    values = found.values
    if which == "LM":
        right, values = np.abs(right), np.abs(values)
    if found.converged:
        np.testing.assert_allclose(values, right, atol=(found.tol + 1e-6) * scale)


@pytest.mark.parametrize(("which", "k", "tol"), SQUARE)
def test_few_large_eigenvalues_among_many(which, tol, k):
    op = diagonal_operator(100_000, ENDS, bulk=1e-3)
    found = eigsh(op, k, which=which, tol=tol, max_basis=max(14, k + 4))
    assert found.converged
    check_claim(found, np.r_[ENDS, np.full(20, 1e-3)], k, which)


@pytest.mark.parametrize(("which", "tol"), some([("SA", 1e-3), ("LA", 1e-2)], 1))
def test_three_million_rows(which, tol):
    op = diagonal_operator(3_000_000, [1000.0, -400.0], bulk=1e-3)
    found = eigsh(op, 1, which=which, tol=tol, max_basis=8)
    assert found.converged
    np.testing.assert_allclose(found.values, [-400.0 if which == "SA" else 1000.0], rtol=1e-3)


@pytest.mark.parametrize("bulk", some([1.0, 0.0], 1))
def test_an_outlier_that_the_first_products_hardly_show(bulk):
    """The random vector has residual 1 / √n: small beside any tolerance, and no eigenvector."""
    op = diagonal_operator(1_000_000, [bulk + 1.0], bulk=bulk)
    for tol in (0.3, 1e-1, 1e-3):
        found = eigsh(op, 1, tol=tol, max_basis=6)
        assert found.converged
        assert found.values[0] == pytest.approx(bulk + 1.0, abs=tol * (bulk + 1.0))
    second = eigsh(diagonal_operator(1_000_000, [1000.0, 1.0], bulk=0.0), 2, tol=1e-4, max_basis=8)
    assert second.converged
    np.testing.assert_allclose(second.values, [1000, 1], atol=0.1)


@pytest.mark.parametrize("which", ["LA", "SA", "LM", "BE"])
def test_low_rank_plus_identity(which):
    eigenvalues = np.r_[30.0, 12, 12, -25, -4]
    op = low_rank_operator(100_000, eigenvalues, shift=0.5)
    for k in (1, 3, 4):
        found = eigsh(op, k, which=which, tol=1e-3, max_basis=12)
        assert found.converged
        check_claim(found, np.r_[eigenvalues + 0.5, np.full(9, 0.5)], k, which)


@pytest.mark.parametrize(("which", "k"), [("LA", 5), ("LM", 5), ("BE", 10)])
def test_residuals_of_repeated_eigenvalues_are_as_estimated(which, k):
    """Sums of 65,536 float32 products are wrong by 1e-5: a basis made with them has such residuals."""
    n, ends = 100_000, torch.tensor([30.0, 30, 30, 12, -25, -25])
    d = torch.full((n,), 1e-3)
    d[:3] = ends[:3]
    places = torch.randperm(n - 3, generator=generator(1))[:3000].view(3, 1000) + 3
    U = torch.zeros(n, 3).scatter_(0, places.T, 1000**-0.5)
    op = FunctionOperator(
        lambda V: d[:, None] * V + U @ ((ends[3:, None] - 1e-3) * (U.T @ V)),
        (n, n),
        dtype=torch.float32,
        symmetric=True,
    )
    found = eigsh(op, k, which=which, tol=1e-5, max_basis=14, vectors=False)
    assert found.converged
    assert found.residuals.max() < 0.5 * 1e-5 * 30


@pytest.mark.parametrize("seed", some(range(6), 1))
def test_bulk_without_gaps_is_never_claimed_wrongly(seed):
    bulk = np.random.default_rng(seed).uniform(-1, 1, 20_000)
    eigenvalues = np.r_[1.05, 1.02, bulk]
    op = diagonal_operator(len(eigenvalues), eigenvalues)
    for which in ("LA", "SA", "LM"):
        found = eigsh(op, 2, which=which, tol=1e-2, max_basis=14, seed=seed, max_products=300)
        check_claim(found, eigenvalues, 2, which)
        assert which != "LA" or found.converged


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1e-200, torch.float64), (1e200, torch.float64), (1e-30, torch.float32), (1e30, torch.float32)],
)
def test_the_size_of_an_operator_does_not_matter(size, dtype):
    eigenvalues = np.r_[3.0, 2.0, 2.0, np.linspace(-1, 1, 297)]
    A = (with_spectrum(eigenvalues).A * size).to(dtype)
    op = FunctionOperator(lambda V: A @ V, (300, 300), dtype=dtype, symmetric=True)
    found = eigsh(op, 3)
    assert found.converged
    np.testing.assert_allclose(found.values / size, [3, 2, 2], rtol=1e-3 if dtype is torch.float32 else 1e-7)
    assert (found.residuals <= found.tol * 3 * size).all()


def test_the_zero_operator_and_single_rows():
    zero = FunctionOperator(torch.zeros_like, (100_000, 100_000), dtype=torch.float32, symmetric=True)
    found = eigsh(zero, 3, which="LM")
    assert found.converged
    assert (found.values == 0).all()
    one = FunctionOperator(lambda V: -2 * V, (1, 1), symmetric=True)
    assert eigsh(one, 1).values[0] == -2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_product_that_breaks_later_is_reported(bad):
    calls = []

    def product(V):
        calls.append(1)
        return V * (bad if len(calls) > 5 else 1.0) * torch.linspace(0, 1, len(V), dtype=V.dtype)[:, None]

    with pytest.raises(CurvescopeError, match="not finite"):
        eigsh(FunctionOperator(product, (5000, 5000), symmetric=True), 1)


@pytest.mark.parametrize("k", [1, 4])
def test_exact_starts_cost_a_handful(k):
    op = Counting(diagonal_operator(100_000, ENDS, bulk=1e-3))
    cold = eigsh(op, k)
    warm = eigsh(op, k, v0=cold.vectors)
    assert cold.converged
    assert warm.converged
    assert warm.num_products <= 2 * k + 5
    np.testing.assert_allclose(warm.values, cold.values, rtol=1e-6)


@pytest.mark.parametrize("moved", [1e-3, 1e-1])
def test_a_start_near_the_eigenvector_costs_a_handful(moved):
    A = with_spectrum(np.r_[100.0, 60, 40, np.random.default_rng(0).normal(0, 1, 397)]).A
    E = with_spectrum(np.random.default_rng(1).normal(0, 1, 400), seed=1).A
    before = eigsh(Matrix(A), 1, tol=1e-4)
    op = Matrix(A + moved * E, symmetric=True)
    cold, warm = eigsh(op, 1, tol=1e-4), eigsh(op, 1, tol=1e-4, v0=before.vectors)
    assert warm.converged
    assert warm.num_products <= 8 < cold.num_products
    np.testing.assert_allclose(warm.values, cold.values, rtol=1e-6)


def test_starts_that_are_the_wrong_eigenvectors_do_no_harm():
    eigenvalues = np.r_[5.0, 4, 3, 2, np.random.default_rng(0).uniform(-1, 1, 396)]
    op = with_spectrum(eigenvalues)
    vectors = np.linalg.eigh(op.A.numpy())[1]
    for starts in (vectors[:, -4:-2], vectors[:, :3], vectors[:, [5, 5, 5]], np.ones((400, 2))):
        found = eigsh(op, 2, v0=starts)
        assert found.converged
        np.testing.assert_allclose(found.values, [5, 4], atol=1e-8)
