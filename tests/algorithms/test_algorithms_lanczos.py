"""Eigenpairs and Lanczos processes of known spectra: values, residuals, restarts, limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms_known import SPECTRA, Counting, uniform, wanted, with_spectrum

from curvescope.algorithms import Eigenpairs, eigsh, lanczos
from curvescope.algorithms.spectra import restart as restart_module
from curvescope.core.errors import CurvescopeError, ShapeError, UsageError
from curvescope.core.operator import FunctionOperator, Matrix
from curvescope.core.seeds import generator, probes
from selection import pairs, some

WHICH = ["LA", "SA", "LM", "BE"]


def check(found: Eigenpairs, op: Matrix, eigenvalues: np.ndarray, which: str, slack: float = 1e-10) -> None:
    """Right values in the right order, true residuals, orthonormal vectors."""
    scale = max(np.abs(eigenvalues).max(), 1e-30)
    k = len(found.values)
    right = wanted(eigenvalues, k, which)
    if which == "LM":  # the order within ties of |λ| is free
        assert np.all(np.diff(np.abs(found.values)) <= slack * scale)
        np.testing.assert_allclose(np.abs(found.values), np.abs(right), atol=slack * scale)
    else:
        np.testing.assert_allclose(found.values, right, atol=slack * scale)
    A, V = op.A.double().numpy(), found.vectors.double().numpy()
    np.testing.assert_allclose(V.T @ V, np.eye(k), atol=1e3 * torch.finfo(op.dtype).eps)
    true = np.linalg.norm(A @ V - V * found.values, axis=0)
    np.testing.assert_allclose(found.residuals, true, rtol=0.05, atol=30 * torch.finfo(op.dtype).eps * scale)
    assert found.converged
    assert found.converged_mask.all()
    assert (found.residuals <= found.tol * scale * (1 + 1e-6)).all()


@pytest.mark.parametrize(("name", "which"), pairs([*SPECTRA], WHICH, every=2))
def test_eigenpairs_of_known_spectra(name, which):
    eigenvalues = SPECTRA[name]
    op = with_spectrum(eigenvalues)
    k = min(6, len(eigenvalues))
    check(eigsh(op, k, which=which), op, eigenvalues, which)


@pytest.mark.parametrize(
    ("name", "which"),
    pairs(["repeated", "indefinite", "rank three", "even"], WHICH, shift=2)
    + some([("outliers", which) for which in WHICH], 0),
)
def test_small_basis_restarts_and_still_converges(name, which):
    eigenvalues = SPECTRA[name]
    op = with_spectrum(eigenvalues)
    found = eigsh(op, 5, which=which, max_basis=20, tol=1e-7, max_products=4000)
    check(found, op, eigenvalues, which)


@pytest.mark.parametrize(
    ("name", "which"),
    pairs(["outliers", "repeated", "clustered", "indefinite", "zero", "small"], WHICH, shift=2),
)
def test_float32(name, which):
    eigenvalues = SPECTRA[name]
    op = with_spectrum(eigenvalues, dtype=torch.float32)
    found = eigsh(op, 6, which=which)
    assert found.vectors.dtype == torch.float32
    assert found.tol == 1e-4
    # eigenvalues within tol of each other count as equal, so the wrong one of a pair is off by at most that
    check(found, op, eigenvalues, which, slack=1e-4)


def test_restarts_happen_within_max_basis():
    op = Counting(with_spectrum(SPECTRA["even"]))
    search = restart_module.Search(op, k=3, which="LA", tol=1e-8, max_basis=12, max_products=2000, seed=0)
    search.run()
    assert search.rows.shape[0] == 13
    assert op.columns == search.products > 50
    assert search.verified


def test_repeated_eigenvalue_as_often_as_k():
    eigenvalues = np.r_[[4.0] * 7, uniform(-1, 1, 193)]
    op = with_spectrum(eigenvalues)
    for k in (7, 8):
        check(eigsh(op, k), op, eigenvalues, "LA")


@pytest.mark.parametrize("seed", some(range(4), 1))
def test_copies_near_the_edge_of_the_bulk_are_not_overlooked(seed):
    eigenvalues = np.r_[[1.06] * 4, np.linspace(-1, 1, 296)]
    op = with_spectrum(eigenvalues)
    check(eigsh(op, 5, seed=seed), op, eigenvalues, "LA")


def test_all_pairs_of_a_small_operator():
    eigenvalues = uniform(-1, 1, 70)
    op = with_spectrum(eigenvalues)
    check(eigsh(op, 70, which="SA"), op, eigenvalues, "SA")


def test_start_vector_that_misses_the_answer():
    # v0 is an eigenvector of the second eigenvalue: its Krylov space has dimension one
    eigenvalues = np.r_[2.0, 1.9, uniform(-1, 1, 198)]
    op = with_spectrum(eigenvalues)
    second = torch.linalg.eigh(op.A)[1][:, -2].contiguous()
    check(eigsh(op, 1, v0=second), op, eigenvalues, "LA")


def test_wide_dynamic_range_is_relative_to_the_largest():
    eigenvalues = np.logspace(-12, 3, 200)
    op = with_spectrum(eigenvalues)
    check(eigsh(op, 8), op, eigenvalues, "LA", slack=1e-12)


def test_products_are_counted_and_limited():
    op = Counting(with_spectrum(SPECTRA["even"]))
    found = eigsh(op, 4, max_products=17)
    assert found.num_products == op.columns == 17
    assert not found.converged
    assert not found.converged_mask.all()
    assert found.values.shape == (4,)
    assert found.vectors.shape == (200, 4)
    V = found.vectors.numpy()
    true = np.linalg.norm(op.inner.A.numpy() @ V - V * found.values, axis=0)
    np.testing.assert_allclose(found.residuals, true, rtol=1e-6)
    assert (found.values <= 1 + 1e-12).all()  # Ritz values stay inside the spectrum


def test_too_few_products_for_an_exhausted_space_still_give_k_pairs():
    found = eigsh(with_spectrum(SPECTRA["rank three"]), 6, max_products=12)
    assert found.values.shape == (6,)
    np.testing.assert_allclose(found.vectors.T @ found.vectors, np.eye(6), atol=1e-12)


def test_converged_means_that_something_better_was_looked_for():
    # the pairs have small residuals before the products for the last sweep are there
    eigenvalues = np.r_[[4.0] * 2, np.linspace(-1, 1, 198)]
    op = with_spectrum(eigenvalues)
    limits = range(12, 60, 4)
    runs = [eigsh(op, 2, max_products=limit) for limit in limits]
    assert any(run.converged_mask.all() and not run.converged for run in runs)
    assert runs[-1].converged
    for run in runs:
        if run.converged:
            np.testing.assert_allclose(run.values, [4.0, 4.0])


def test_seed_decides():
    op = with_spectrum(SPECTRA["normal"])
    first, again, other = (eigsh(op, 2, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.vectors, again.vectors)
    assert not np.array_equal(first.vectors, other.vectors)
    np.testing.assert_allclose(first.values, other.values, atol=1e-10)


def test_agrees_with_scipy():
    from scipy.sparse.linalg import eigsh as scipy_eigsh

    op = with_spectrum(SPECTRA["normal"])
    for which in ("LM", "BE"):
        ours = eigsh(op, 5, which=which, vectors=False)
        theirs = scipy_eigsh(op.to_scipy(), 5, which=which, return_eigenvectors=False)
        assert ours.vectors is None
        np.testing.assert_allclose(np.sort(ours.values), np.sort(theirs), atol=1e-10)


def test_saved_and_framed(tmp_path):
    found = eigsh(with_spectrum(SPECTRA["small"]), 3)
    again = Eigenpairs.load(found.save(tmp_path))
    np.testing.assert_array_equal(again.vectors, found.vectors)
    assert list(found.to_frame().columns) == ["value", "residual", "converged"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"k": 0}, "expected k between 1 and 200, got 0"),
        ({"k": 201}, "expected k between 1 and 200, got 201"),
        ({"k": 2.5}, "expected a whole number k"),
        ({"which": "SR"}, "expected which to be one of 'LA', 'SA', 'LM', 'BE', 'SM', got 'SR'"),
        ({"tol": 0.0}, "expected a finite tol above 0.0"),
        ({"max_products": 3}, "expected max_products of at least 12"),
        ({"max_basis": 7}, "expected max_basis of at least 10"),
        ({"v0": torch.zeros(200, dtype=torch.float64)}, "v0 as one vector"),
        ({"v0": torch.ones(3, dtype=torch.float64)}, "expected a vector of 200 entries"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(UsageError, match=text):
        eigsh(with_spectrum(SPECTRA["even"]), **options)


def test_wrong_operators(monkeypatch):
    with pytest.raises(UsageError, match="eigsh needs a symmetric operator"):
        eigsh(Matrix(torch.ones(4, 3, dtype=torch.float64)), 1)
    with pytest.raises(ShapeError, match="at least one row"):
        eigsh(Matrix(torch.ones(0, 0, dtype=torch.float64)), 1)
    with pytest.raises(UsageError, match="needs a float32 or float64 operator"):
        eigsh(Matrix(torch.ones(4, 4, dtype=torch.float16)), 1)
    with pytest.raises(UsageError, match="needs a LinearOperator, got Tensor"):
        eigsh(torch.ones(4, 4), 1)
    for n in (5, 200):
        broken = FunctionOperator(lambda V: V * torch.nan, (n, n), symmetric=True)
        with pytest.raises(CurvescopeError, match="not finite"):
            eigsh(broken, 1)
    huge = FunctionOperator(lambda V: V, (10**9, 10**9), symmetric=True)
    with pytest.raises(UsageError, match="more than 8 GiB"):
        eigsh(huge, 6)


def test_lock_step_columns_are_independent():
    op = with_spectrum(SPECTRA["normal"])
    start = probes(200, 5, seed=3)
    together = lanczos(op, start, 12)
    assert together.num_products == 60
    for j in range(5):
        alone = lanczos(op, start[:, j : j + 1], 12)
        np.testing.assert_allclose(together.alpha[j], alone.alpha[0], atol=1e-11)
        np.testing.assert_allclose(together.beta[j], alone.beta[0], atol=1e-11)


@pytest.mark.parametrize("reorthogonalize", [True, False])
def test_quadrature_integrates_polynomials(reorthogonalize):
    op = with_spectrum(uniform(-1, 1, 60))
    start = probes(60, 3, seed=1)
    nodes, weights = lanczos(op, start, 5, reorthogonalize=reorthogonalize).quadrature()
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    power = start / 60**0.5
    for degree in range(10):
        right = (start * power).sum(dim=0) / 60**0.5
        np.testing.assert_allclose((weights * nodes**degree).sum(axis=1), right.numpy(), atol=1e-12)
        power = op @ power


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_each_column_ends_when_its_space_is_exhausted(dtype):
    op = Matrix(torch.diag(torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], dtype=dtype)))
    start = torch.zeros(8, 3, dtype=dtype)
    start[2, 0] = 5  # an eigenvector
    start[:3, 1] = 1  # three eigenvectors
    start[:, 2] = 1
    found = lanczos(op, start, 8)
    np.testing.assert_array_equal(found.lengths, [1, 3, 8])
    nodes, weights = found.quadrature()
    assert nodes[0, 0] == pytest.approx(3)
    np.testing.assert_allclose(nodes[1, :3], [1, 2, 3], atol=1e-5)
    np.testing.assert_allclose(weights[1, :3], 1 / 3, atol=1e-5)
    np.testing.assert_allclose(nodes[2], np.arange(1, 9), atol=1e-5)
    assert weights[1, 3:].sum() == 0
    zero = lanczos(Matrix(torch.zeros(8, 8, dtype=dtype)), start, 4)
    np.testing.assert_array_equal(zero.lengths, [1, 1, 1])


def test_full_reorthogonalization_keeps_copies_out():
    eigenvalues = np.r_[100.0, uniform(0, 1, 199)]
    op = with_spectrum(eigenvalues)
    start = probes(200, 1, seed=0)
    with_it = lanczos(op, start, 60).quadrature()[0]
    without = lanczos(op, start, 60, reorthogonalize=False).quadrature()[0]
    assert (with_it > 50).sum() == 1
    assert (without > 50).sum() > 1


def test_wrong_start_columns():
    op = with_spectrum(SPECTRA["small"])
    with pytest.raises(ShapeError, match="start columns"):
        lanczos(op, torch.ones(30, dtype=torch.float64), 3)
    with pytest.raises(ShapeError, match="zero column"):
        lanczos(op, torch.zeros(30, 2, dtype=torch.float64), 3)
    with pytest.raises(UsageError, match="num_steps of at least 1"):
        lanczos(op, torch.ones(30, 1, dtype=torch.float64), 0)
    with pytest.raises(CurvescopeError, match="not finite"):
        lanczos(FunctionOperator(lambda V: V / 0, (3, 3), symmetric=True), torch.ones(3, 1).double(), 2)


def test_generator_is_not_global():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    eigsh(with_spectrum(SPECTRA["even"]), 2)
    assert torch.equal(before, torch.random.get_rng_state())
    assert generator(0) is not generator(0)


def test_long_float32_vectors_are_measured_in_double():
    """Half a million entries of very different size: sums in float32 would be wrong by 1e-4."""
    n = 500_000
    sizes = 1000 / torch.arange(1, n + 1, dtype=torch.float32)
    op = FunctionOperator(lambda V: sizes[:, None] * V, (n, n), dtype=torch.float32, symmetric=True)
    found = eigsh(op, k=3, which="LA")
    assert found.converged
    V = torch.as_tensor(found.vectors).double()
    assert (V.T @ V - torch.eye(3, dtype=torch.float64)).abs().max() < 1e-6
    np.testing.assert_allclose(found.values, [1000, 500, 1000 / 3], rtol=1e-6)
