"""Inverses as operators, least squares, series and preconditioners against dense truths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms_known import Counting, with_spectrum

from curvescope.algorithms import inverse, solve
from curvescope.core.errors import CurvescopeError, ShapeError, UsageError
from curvescope.core.operator import Diagonal, FunctionOperator, Identity, Matrix
from curvescope.core.seeds import probes
from selection import pairs

N = 60
POSITIVE = with_spectrum(np.linspace(0.5, 10, N), psd=True)
INDEFINITE = with_spectrum(np.r_[np.linspace(-5, -0.5, 25), np.linspace(0.5, 5, N - 25)])


def columns(k: int = 3, n: int = N, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return probes(n, 2 * k, seed=5, kind="gaussian", dtype=dtype)[:, ::2]  # not contiguous


def near(found, truth: torch.Tensor, tol: float = 1e-6) -> None:
    np.testing.assert_allclose(np.asarray(found), truth.numpy(), rtol=0, atol=tol * float(truth.abs().max()))


SOLVED = [
    ("cg", POSITIVE),
    ("minres", INDEFINITE),
    ("neumann", POSITIVE),
    ("lsmr", INDEFINITE),
    ("minres", POSITIVE),
    ("lsmr", POSITIVE),
]
KINDS = [(torch.float64, 0.0), (torch.float32, 0.2), (torch.float64, 0.2), (torch.float32, 0.0)]


@pytest.mark.parametrize(("solved", "kind"), pairs(SOLVED, KINDS))
def test_an_inverse_is_that_of_the_matrix(solved, kind):
    (method, op), (dtype, damping) = solved, kind
    A = Matrix(op.A.to(dtype), symmetric=True, psd=op.psd)
    inv, truth = inverse(A, method=method, damping=damping), torch.linalg.inv(op.A + damping * torch.eye(N))
    B, tol = columns(dtype=dtype), 1e-6 if dtype is torch.float64 else 1e-3
    assert inv.shape == (N, N)
    assert inv.symmetric
    assert inv.psd is op.psd
    assert inv.last is None
    near(inv @ B, truth @ B.double(), tol)
    assert inv.last.converged
    assert inv.last.method == method
    assert inv.last.residual.shape == (3,)
    near(B.T @ inv, B.T.double() @ truth, tol)
    single = inv @ B[:, 0].numpy()
    assert isinstance(single, np.ndarray)
    near(single, truth @ B[:, 0].double(), tol)
    assert inv.num_products >= inv.last.num_products > 0


@pytest.mark.parametrize(("method", "scale"), pairs(["cg", "minres", "lsmr", "neumann"], [1e-30, 1e30]))
def test_the_size_of_the_operator_does_not_matter(method, scale):
    inv = inverse(scale * POSITIVE, method=method)
    near(inv @ columns() * scale, torch.linalg.solve(POSITIVE.A, columns()))


@pytest.mark.parametrize(("m", "n"), [(70, 30), (30, 70), (40, 40)])
def test_least_squares_of_rectangles(m, n):
    A, b = torch.randn(m, n, generator=torch.Generator().manual_seed(0)).double(), columns(2, m)
    inv = inverse(Matrix(A), method="lsmr", tol=1e-10, max_products=4000)
    pseudo = torch.linalg.pinv(A)
    near(inv @ b, pseudo @ b, 1e-5)
    assert inv.last.converged
    assert ("least-squares" in inv.last.reason) == (m > n)
    near(inv.T @ columns(2, n), pseudo.T @ columns(2, n), 1e-5)
    residual = torch.linalg.norm(b - A @ pseudo @ b, dim=0) / torch.linalg.norm(b, dim=0)
    np.testing.assert_allclose(solve(Matrix(A), b, method="lsmr").residual, residual, atol=1e-6)


def test_least_squares_of_singular_and_zero_systems():
    singular = with_spectrum(np.r_[np.zeros(10), np.linspace(1, 2, N - 10)], psd=True)
    found = solve(singular, columns(), method="lsmr")
    assert found.converged
    assert "least-squares" in found.reason
    near(found.x, torch.linalg.pinv(singular.A, rtol=1e-6) @ columns())
    nothing = solve(Matrix(torch.zeros(4, 3).double()), torch.ones(4).double(), method="lsmr")
    assert nothing.converged
    assert (nothing.x == 0).all()
    assert nothing.residual == 1
    zero = solve(POSITIVE, torch.zeros(N).double(), method="lsmr")
    assert zero.converged
    assert (zero.x == 0).all()


SKEWED = np.logspace(-4, 0, N)


@pytest.mark.parametrize(
    ("case", "dtype"),
    pairs([("cg", "psd"), ("minres", "indefinite"), ("minres", "psd")], [torch.float32, torch.float64]),
)
def test_a_preconditioner_saves_products(case, dtype):
    """A = D^½ K D^½ with K near the identity, and M = D⁻¹."""
    method, sign = case
    K = with_spectrum(np.linspace(1, 2, N)) if sign == "psd" else with_spectrum([-1.0, 1, 2] * (N // 3))
    d = torch.as_tensor(np.random.default_rng(0).permutation(SKEWED))
    A = (d.sqrt()[:, None] * K.A * d.sqrt()).to(dtype)
    op = Counting(Matrix(A, symmetric=True, psd=sign == "psd"))
    M = 1e-20 * Diagonal((1 / d).to(dtype))  # its size does not matter
    b, tol = columns(dtype=dtype), 1e-8 if dtype is torch.float64 else 1e-4
    found = solve(op, b, method=method, preconditioner=M, tol=tol)
    assert found.converged
    assert found.num_products == op.columns
    residual = torch.linalg.norm(b.double() - A.double() @ torch.as_tensor(found.x).double(), dim=0)
    assert (residual / torch.linalg.norm(b.double(), dim=0) <= 1.1 * tol).all()
    plain = solve(op, b, method=method, tol=tol)
    assert found.num_products < 0.5 * plain.num_products


def test_the_exact_inverse_as_preconditioner_is_found_at_once():
    M = Matrix(torch.linalg.inv(INDEFINITE.A @ INDEFINITE.A), symmetric=True, psd=True)
    squared = INDEFINITE @ INDEFINITE
    assert solve(squared, columns(), preconditioner=M).num_products <= 9
    for method in ("lsmr", "neumann"):
        found = solve(squared, columns(), method=method, preconditioner=M)
        assert found.converged
        near(found.x, torch.linalg.solve(INDEFINITE.A @ INDEFINITE.A, columns()))


def test_an_inverse_is_a_preconditioner():
    rough = inverse(POSITIVE, method="neumann", max_products=6, inexact=True)
    found = solve(POSITIVE, columns(), preconditioner=rough)
    assert found.converged
    near(found.x, torch.linalg.solve(POSITIVE.A, columns()))


def test_what_does_not_converge_is_an_error_unless_taken_as_it_is():
    hard = with_spectrum(np.logspace(-9, 0, N), psd=True)
    strict, loose = (inverse(hard, max_products=10, inexact=inexact) for inexact in (False, True))
    with pytest.raises(
        CurvescopeError, match=r"not found to tol = 1e-08: the residual is .* of b, stopped at"
    ):
        strict @ columns()
    assert not strict.last.converged
    assert (loose @ columns()).shape == (N, 3)
    assert loose.last.reason == "stopped at max_products = 10"


def test_a_series_that_diverges_says_so():
    found = solve(POSITIVE, columns(), method="neumann", scale=1.0)
    assert not found.converged
    assert "the series diverges" in found.reason
    assert np.isfinite(found.x).all()
    one = FunctionOperator(lambda V: 0.5 * V, (N, N), symmetric=True, psd=True)
    near(solve(one, columns(), method="neumann", scale=1.0).x, 2 * columns())


def test_inverses_compose():
    inv = inverse(POSITIVE)
    D = Diagonal(torch.linspace(1, 2, N).double())
    both = D @ inv @ D
    assert both.symmetric
    assert both.psd
    near((both @ columns()), D.d[:, None] * torch.linalg.solve(POSITIVE.A, D.d[:, None] * columns()))
    assert (inv @ columns()[:, :0]).shape == (N, 0)


WRONG = {
    "cg of what may be indefinite": (
        lambda: inverse(INDEFINITE) @ columns(),
        "declared psd or a damping above 0",
    ),
    "rectangle": (lambda: inverse(Matrix(torch.ones(2, 3))), "inverse needs a square operator"),
    "tensor": (lambda: inverse(torch.eye(3)), "inverse needs a LinearOperator, got Tensor"),
    "method": (lambda: inverse(POSITIVE, method="lu"), "expected method to be one of"),
    "not symmetric": (
        lambda: inverse(Matrix(torch.tensor([[1.0, 2], [0, 1]])), method="minres") @ torch.ones(2),
        "needs a symmetric operator",
    ),
    "damped rectangle": (
        lambda: solve(Matrix(torch.ones(2, 3)), torch.ones(2), method="lsmr", damping=1.0),
        "damping needs a square operator",
    ),
    "no operator": (
        lambda: solve(POSITIVE, columns(), preconditioner=torch.eye(N)),
        "as preconditioner, got Tensor",
    ),
    "other size": (
        lambda: solve(POSITIVE, columns(), preconditioner=Identity(5)),
        "preconditioner of 60 × 60",
    ),
    "other dtype": (
        lambda: solve(POSITIVE, columns(), preconditioner=Identity(N, dtype=torch.float32)),
        "in torch.float64 on cpu, got Identity",
    ),
    "crooked": (
        lambda: solve(POSITIVE, columns(), preconditioner=Matrix(torch.ones(N, N).double().triu())),
        "needs a symmetric preconditioner",
    ),
    "negative": (
        lambda: solve(POSITIVE, columns(), preconditioner=-1.0 * Identity(N)),
        r"expected a positive definite preconditioner, but rᵀ M r = -",
    ),
    "scale": (lambda: solve(POSITIVE, columns(), scale=1.0), "scale belongs to method='neumann'"),
    "scale of zero": (
        lambda: solve(POSITIVE, columns(), method="neumann", scale=0),
        "expected a finite scale",
    ),
    "complex": (
        lambda: solve(POSITIVE, columns() * 1j),
        "expected torch.float64 on cpu, got torch.complex128",
    ),
    "short": (lambda: solve(Matrix(torch.ones(2, 3)), torch.ones(3), method="lsmr"), "a vector of 2 entries"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_one_sentence(name):
    call, message = WRONG[name]
    with pytest.raises((UsageError, ShapeError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
