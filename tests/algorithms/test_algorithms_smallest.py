"""The smallest eigenvalues: right where they are resolved, said where they are not; deflation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from algorithms_known import Counting, uniform, with_spectrum

from curvescope.algorithms import deflate, eigsh, spectral_density, trace
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import Matrix
from selection import most, some

N = 90


@pytest.fixture
def not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvescope.algorithms.spectra.lanczos.SMALLEST_ROWS", 1)


searched = pytest.mark.usefixtures("not_written_out")
RESOLVED = {
    "positive": np.linspace(2, 20, N),
    "indefinite": np.r_[-0.2, 0.3, -0.35, np.linspace(-4, -2, 40), np.linspace(2, 4, N - 43)],
    "repeated": np.r_[[0.5] * 3, [-0.5] * 2, np.linspace(2, 9, N - 5)],
    "clustered": np.r_[0.5 + 1e-5 * np.arange(4), np.linspace(2, 9, N - 4)],
    "apart": np.r_[1e-3, -1e-2, 0.1, np.linspace(2, 9, N - 3)],
    "identity": np.ones(N),
}


@searched
@pytest.mark.parametrize(
    ("name", "k"),
    most(list(zip(RESOLVED, [1, 3, 5, 3, 3, 2], strict=True)), but=[("positive", 1), ("clustered", 3)]),
)
def test_the_smallest_are_found(name, k):
    op = Counting(with_spectrum(RESOLVED[name]))
    found = eigsh(op, k, which="SM")
    right = np.sort(np.abs(RESOLVED[name]))[:k]
    assert found.converged
    assert found.reason == ""
    assert found.which == "SM"
    assert found.num_products == op.columns
    np.testing.assert_allclose(np.abs(found.values), right, rtol=1e-7)
    for value in found.values:
        assert np.abs(RESOLVED[name] - value).min() < 1e-7
    V, A = torch.as_tensor(found.vectors), op.inner.A
    measured = torch.linalg.norm(A @ V - V * torch.as_tensor(found.values), dim=0)
    np.testing.assert_allclose(found.residuals, measured, atol=1e-13)
    torch.testing.assert_close(V.T @ V, torch.eye(k).double(), rtol=0, atol=1e-12)


@searched
@pytest.mark.parametrize("scale", some([1e-30, 1e30], 1))
def test_the_size_does_not_matter(scale):
    found = eigsh(scale * with_spectrum(RESOLVED["indefinite"]), 3, which="SM")
    assert found.converged
    np.testing.assert_allclose(found.values / scale, [-0.2, 0.3, -0.35], rtol=1e-7)


@searched
def test_float32():
    found = eigsh(with_spectrum(RESOLVED["indefinite"], dtype=torch.float32), 3, which="SM")
    assert found.converged
    np.testing.assert_allclose(found.values, [-0.2, 0.3, -0.35], rtol=1e-3)


UNRESOLVED = {
    "singular": np.r_[0.0, np.linspace(1, 2, N - 1)],
    "null space": np.r_[np.zeros(20), uniform(-1, 1, N - 20)],
    "crowd near zero": np.r_[uniform(-1e-12, 1e-12, 60), np.linspace(1, 50, N - 60)],
    "geometric": np.r_[np.logspace(-16, 0, N - 50), -np.logspace(-16, 0, 50)],
}


@searched
@pytest.mark.parametrize("name", most(list(UNRESOLVED), but=["geometric"]))
def test_what_is_not_resolved_is_said_so(name):
    op = with_spectrum(UNRESOLVED[name])
    found = eigsh(op, 3, which="SM", max_products=2000)
    assert not found.converged
    assert found.reason.startswith("not resolved: |λ| is at most ")
    assert found.num_products <= 2000
    exact = np.linalg.eigvalsh(op.A.numpy())
    for value, residual in zip(found.values, found.residuals, strict=True):  # and yet no number is wrong
        assert np.abs(exact - value).min() <= residual + 1e-12
    V = torch.as_tensor(found.vectors)
    measured = torch.linalg.norm(op.A @ V - V * torch.as_tensor(found.values), dim=0)
    np.testing.assert_allclose(found.residuals, measured, atol=1e-13)


@searched
def test_too_few_products_are_said():
    op = Counting(with_spectrum(RESOLVED["indefinite"]))
    found = eigsh(op, 3, which="SM", max_products=60)
    assert not found.converged
    assert "max_products" in found.reason or "not enough" in found.reason
    assert op.columns == found.num_products <= 60


def test_small_operators_are_written_out():
    middling = eigsh(with_spectrum(RESOLVED["indefinite"]), 3, which="SM")
    assert middling.converged
    assert middling.num_products == N
    np.testing.assert_allclose(middling.values, [-0.2, 0.3, -0.35], rtol=1e-12)
    values = np.r_[-3.0, 0.5, 0.7, -0.6, 9]
    found = eigsh(with_spectrum(values), 3, which="SM")
    np.testing.assert_allclose(found.values, [0.5, -0.6, 0.7], rtol=1e-12)
    assert found.converged
    assert found.num_products == 5
    singular = eigsh(with_spectrum([0.0, 1, 2, 3]), 1, which="SM")
    assert not singular.converged
    assert "from zero" in singular.reason
    row = torch.ones(70, 70).double().tril().cumsum(0)
    row[0], row[:, 0] = 0, 0
    zero = eigsh(Matrix(row + row.T), 1, which="SM")  # whose vector is found to the last digit
    assert zero.residuals[0] >= torch.finfo(torch.float64).eps * float(torch.linalg.norm(row + row.T, 2))
    assert not zero.converged
    assert "from zero" in zero.reason
    assert eigsh(Matrix(torch.zeros(3, 3).double()), 2, which="SM").converged


@pytest.mark.parametrize("dtype", some([torch.float64, torch.float32], 1))
def test_deflation_takes_pairs_out(dtype):
    values = np.r_[50.0, 30, -20, np.linspace(-1, 1, 117)]
    op = with_spectrum(values, dtype=dtype)
    pairs = eigsh(op, 3, which="LM")
    rest = deflate(op, pairs)
    assert rest.symmetric
    close = 1e-6 if dtype is torch.float64 else 1e-2
    exact = (
        op.A.double()
        - torch.as_tensor(pairs.vectors * pairs.values).double() @ torch.as_tensor(pairs.vectors).double().T
    )
    torch.testing.assert_close(rest.to_dense().double(), exact, rtol=0, atol=close)
    assert abs(eigsh(rest, 1, which="LM").values[0]) == pytest.approx(1, abs=close)
    # the trace of both parts, with an error that is that of the rest alone
    plain, left = trace(op, num_probes=20), trace(rest, num_probes=20)
    assert pairs.values.sum() + left.value == pytest.approx(values.sum(), abs=4 * left.stderr + close)
    assert left.stderr < 0.2 * plain.stderr
    assert spectral_density(rest, num_steps=30).extremes == pytest.approx([-1, 1], abs=0.05)


def test_deflation_keeps_what_is_known_of_rough_vectors():
    op = with_spectrum(np.linspace(0, 5, 70), psd=True)
    V = torch.randn(70, 4, generator=torch.Generator().manual_seed(0)).double()
    rest = deflate(op, V)
    assert rest.psd
    Q = torch.linalg.qr(V)[0]
    P = torch.eye(70).double() - Q @ Q.T
    torch.testing.assert_close(rest.to_dense(), P @ op.A @ P, rtol=0, atol=1e-12)
    torch.testing.assert_close(deflate(op, V.numpy()).to_dense(), rest.to_dense())
    torch.testing.assert_close(deflate(op, V[:, 0]).to_dense(), deflate(op, V[:, :1]).to_dense())


def test_wrong_deflations():
    op = with_spectrum(np.linspace(1, 2, 5))
    with pytest.raises(UsageError, match="expected eigenpairs with vectors"):
        deflate(op, eigsh(op, 1, vectors=False))
    with pytest.raises(ShapeError, match="a vector of 5 entries"):
        deflate(op, torch.ones(4))
    with pytest.raises(UsageError, match="independent"):
        deflate(op, torch.ones(5, 2))
    with pytest.raises(UsageError, match="independent"):
        deflate(op, torch.zeros(5))
    with pytest.raises(UsageError, match="finite"):
        deflate(op, torch.full((5,), torch.nan))
    with pytest.raises(ShapeError, match="at most 5 vectors"):
        deflate(op, torch.ones(5, 6))
    with pytest.raises(UsageError, match="deflate needs a symmetric operator"):
        deflate(Matrix(torch.ones(2, 3)), torch.ones(3))
