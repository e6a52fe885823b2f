"""Linear systems with known solutions, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from algorithms_known import Counting, uniform, with_spectrum

from curvescope.algorithms import Solution, solve
from curvescope.core.errors import CurvescopeError, ShapeError, UsageError
from curvescope.core.operator import FunctionOperator, Identity, Matrix
from curvescope.core.seeds import probes
from selection import pairs

POSITIVE = np.linspace(0.5, 10, 120)
INDEFINITE = np.r_[np.linspace(-5, -0.5, 50), np.linspace(0.5, 5, 70)]


def right_hand_sides(n: int = 120, k: int = 3, dtype=torch.float64) -> torch.Tensor:
    return probes(n, k, seed=5, kind="gaussian", dtype=dtype)


def relative_residual(op: Matrix, x: torch.Tensor, b: torch.Tensor, damping: float = 0.0) -> np.ndarray:
    A, b = op.A.double().numpy() + damping * np.eye(op.shape[0]), b.double().numpy()
    return np.linalg.norm(b - A @ x.double().numpy(), axis=0) / np.linalg.norm(b, axis=0)


@pytest.mark.parametrize(("dtype", "damping"), pairs([torch.float64, torch.float32], [0.0, 0.3]))
@pytest.mark.parametrize(
    ("method", "spectrum"), [("cg", POSITIVE), ("minres", POSITIVE), ("minres", INDEFINITE)]
)
def test_solutions_meet_the_tolerance(method, spectrum, damping, dtype):
    op, b = Counting(with_spectrum(spectrum, dtype=dtype, psd=True)), right_hand_sides(dtype=dtype)
    found = solve(op, b, method=method, damping=damping)
    assert found.converged
    assert found.reason == "converged"
    assert found.num_products == op.columns
    assert found.x.shape == (120, 3)
    true = relative_residual(op.inner, found.x, b, damping)
    np.testing.assert_allclose(found.residual, true, rtol=0.1, atol=20 * torch.finfo(dtype).eps)
    assert (true <= found.tol).all()
    if dtype is torch.float64:
        exact = torch.linalg.solve(op.inner.A + damping * torch.eye(120), b)
        np.testing.assert_allclose(found.x, exact.numpy(), atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_one_right_hand_side_equals_its_column(method):
    op, b = with_spectrum(POSITIVE, psd=True), right_hand_sides()
    together = solve(op, b, method=method, tol=1e-12)
    alone = solve(op, b[:, 1], method=method, tol=1e-12)
    assert alone.x.shape == (120,)
    assert alone.residual.shape == ()
    np.testing.assert_allclose(alone.x, together.x[:, 1], atol=1e-10)


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_zero_columns_and_trivial_operators(method):
    op = with_spectrum(POSITIVE, psd=True)
    b = right_hand_sides()
    b[:, 1] = 0
    found = solve(op, b, method=method)
    assert found.converged
    assert (found.x[:, 1] == 0).all()
    nothing = solve(op, torch.zeros(120, dtype=torch.float64), method=method)
    assert nothing.converged
    assert nothing.num_products == 0
    b = right_hand_sides()
    np.testing.assert_allclose(solve(Identity(120) * 2.0, b, method=method).x, b.numpy() / 2, atol=1e-14)
    single = Matrix(torch.full((1, 1), 4.0, dtype=torch.float64), psd=True)
    assert solve(single, torch.ones(1).double(), method=method).x[0] == pytest.approx(0.25)
    damped = solve(
        Matrix(torch.zeros(4, 4).double(), psd=True), torch.ones(4).double(), method=method, damping=0.5
    )
    np.testing.assert_allclose(damped.x, 2)


def test_negative_curvature_is_reported():
    op = with_spectrum(INDEFINITE)
    found = solve(op, right_hand_sides(), damping=1e-3)
    assert not found.converged
    assert "negative curvature" in found.reason
    measured = float(re.findall(r"= (-[\d.e+-]+\d)", found.reason)[0])
    assert INDEFINITE.min() <= measured < 0
    assert solve(op, right_hand_sides(), damping=1.01 - INDEFINITE.min()).converged
    large = solve(1e200 * op, right_hand_sides(), damping=1e197)
    scaled = float(re.findall(r"= (-[\d.e+-]+\d)", large.reason)[0])
    assert scaled == pytest.approx(1e200 * measured, rel=1e-2)
    assert np.isfinite(found.x).all()
    np.testing.assert_allclose(
        found.residual, relative_residual(op, found.x, right_hand_sides(), 1e-3), rtol=1e-6
    )
    # enough damping makes the same operator positive definite
    assert solve(op, right_hand_sides(), damping=6.0).converged


def test_null_space_met_by_cg():
    singular = np.r_[np.zeros(5), np.linspace(1, 2, 115)]
    op = with_spectrum(singular, psd=True)
    found = solve(op, right_hand_sides())
    assert not found.converged
    assert "zero or negative curvature" in found.reason
    # a right-hand side in the range is no trouble
    assert solve(op, op @ right_hand_sides()).converged


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_minres_gives_least_squares_outside_the_range(dtype):
    singular = np.r_[np.zeros(5), np.linspace(-2, -1, 40), np.linspace(1, 2, 75)]
    op, b = with_spectrum(singular, dtype=dtype), right_hand_sides(dtype=dtype)
    found = solve(op, b, method="minres")
    assert not found.converged
    assert "least-squares" in found.reason
    A = op.A.double()
    best = torch.linalg.lstsq(A, b.double(), driver="gelsd", rcond=1e-4).solution
    least = np.linalg.norm((b.double() - A @ best).numpy(), axis=0) / np.linalg.norm(
        b.double().numpy(), axis=0
    )
    np.testing.assert_allclose(found.residual, least, rtol=1e-5)
    assert found.x.abs().max() < 1e3


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_products_are_limited(method):
    op = Counting(with_spectrum(np.logspace(-5, 0, 120), psd=True))
    found = solve(op, right_hand_sides(), method=method, max_products=7)
    assert not found.converged
    assert found.reason == "stopped at max_products = 7"
    assert found.num_products == op.columns == 21
    np.testing.assert_allclose(
        found.residual, relative_residual(op.inner, found.x, right_hand_sides()), rtol=1e-6
    )


def test_impossible_tolerance_is_reported_with_the_true_residual():
    op, b = with_spectrum(np.logspace(-3, 0, 120), dtype=torch.float32, psd=True), right_hand_sides()
    found = solve(op, b.float(), tol=1e-12)
    assert not found.converged
    rounding = torch.finfo(torch.float32).eps * np.linalg.norm(found.x, axis=0) / b.norm(dim=0).numpy()
    away = np.abs(found.residual - relative_residual(op, found.x, b.float()))
    assert (away <= rounding).all()  # which a float32 product of x cannot tell from nothing
    assert (found.residual <= 2 * rounding).all()


@pytest.mark.parametrize("method", ["cg", "minres"])
@pytest.mark.parametrize(("size", "dtype"), [(1e-310, torch.float64), (1e-40, torch.float32)])
def test_a_solution_out_of_range_is_not_converged(method, size, dtype):
    d = size * torch.linspace(1, 2, 100, dtype=dtype)
    op = FunctionOperator(lambda V: d[:, None] * V, (100, 100), dtype=dtype, symmetric=True, psd=True)
    found = solve(op, torch.ones(100, dtype=dtype), method=method)
    assert not found.converged
    assert "outside the range" in found.reason


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_a_small_right_hand_side_of_a_small_operator(method):
    d = 1e-40 * torch.linspace(1, 2, 100, dtype=torch.float32)
    op = FunctionOperator(lambda V: d[:, None] * V, (100, 100), dtype=d.dtype, symmetric=True, psd=True)
    found = solve(op, torch.full((100,), 1e-20), method=method)
    assert found.converged
    np.testing.assert_allclose(found.x, 1e20 / np.linspace(1, 2, 100), rtol=1e-3)


@pytest.mark.parametrize("method", ["cg", "minres"])
@pytest.mark.parametrize(("A_size", "b_size"), pairs([1e-200, 1e150, 1.0], [1.0, 1e-200, 1e200], shift=1))
def test_sizes_do_not_matter(method, A_size, b_size):
    op, b = Matrix(with_spectrum(POSITIVE).A * A_size, symmetric=True, psd=True), right_hand_sides() * b_size
    if A_size * 1e300 < b_size or b_size / A_size == 0:
        return
    found = solve(op, b.numpy(), method=method)  # NumPy is as good as torch
    assert found.converged
    exact = torch.linalg.solve(op.A / A_size, b / b_size).numpy()
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(found.x / (b_size / A_size), exact, atol=1e-6)


def test_a_product_that_is_not_finite_is_reported():
    broken = FunctionOperator(lambda V: V * torch.nan, (120, 120), symmetric=True, psd=True)
    for method in ("cg", "minres"):
        with pytest.raises(CurvescopeError, match="not finite"):
            solve(broken, right_hand_sides(), method=method)


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_many_rows(method):
    n = 300_000
    d = torch.linspace(1, 50, n)
    op = FunctionOperator(lambda V: d[:, None] * V, (n, n), dtype=torch.float32, symmetric=True, psd=True)
    b = probes(n, 1, seed=0, kind="gaussian", dtype=torch.float32)[:, 0]
    found = solve(op, b, method=method)
    assert found.converged
    np.testing.assert_allclose(found.x, (b / d).numpy(), atol=3e-3)


def test_wrong_calls():
    op, b = with_spectrum(uniform(0, 1, 120)), right_hand_sides()
    with pytest.raises(UsageError, match=r"needs an operator declared psd .*GGN.*damping.*method='minres'"):
        solve(op, b)
    with pytest.raises(UsageError, match="damping of at least 0"):
        solve(op, b, damping=-1)
    with pytest.raises(
        UsageError, match="expected method to be one of 'cg', 'minres', 'lsmr', 'neumann', got 'lu'"
    ):
        solve(op, b, method="lu")
    with pytest.raises(ShapeError, match="expected a vector of 120 entries"):
        solve(op, b[:5], method="minres")
    with pytest.raises(UsageError, match="at least one right-hand side"):
        solve(op, b[:, :0], method="minres")
    with pytest.raises(UsageError, match="finite right-hand side"):
        solve(op, b * torch.nan, method="minres")
    with pytest.raises(UsageError, match="max_products of at least 2"):
        solve(op, b, method="minres", max_products=1)
    with pytest.raises(UsageError, match="solve needs a symmetric operator"):
        solve(FunctionOperator(lambda V: V, (120, 120)), b)


def test_saved(tmp_path):
    found = solve(with_spectrum(POSITIVE, psd=True), right_hand_sides()[:, 0])
    again = Solution.load(found.save(tmp_path))
    np.testing.assert_array_equal(again.x, found.x)
    np.testing.assert_array_equal(again.residual, found.residual)
