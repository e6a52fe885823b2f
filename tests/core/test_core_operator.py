"""Lazy algebra of operators against dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import (
    FunctionOperator,
    Identity,
    LinearOperator,
    Matrix,
    check_square_symmetric,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


A, B, C = random(4, 6), random(4, 6, seed=1), random(6, 3, seed=2)
S = random(5, 5) @ random(5, 5).T
S = (S + S.T) / 2

EXPRESSIONS: dict[str, tuple[LinearOperator, Tensor]] = {
    "matrix": (Matrix(A), A),
    "sum": (Matrix(A) + Matrix(B), A + B),
    "difference": (Matrix(A) - Matrix(B), A - B),
    "negative": (-Matrix(A), -A),
    "multiple": (2.5 * Matrix(A) * 2, 5 * A),
    "transpose": (Matrix(A).T, A.T),
    "product": (Matrix(A) @ Matrix(C), A @ C),
    "transposed product": ((Matrix(A) @ Matrix(C)).T, (A @ C).T),
    "nested": ((Matrix(A).T @ (Matrix(A) - 3 * Matrix(B))).T, (A.T @ (A - 3 * B)).T),
    "damped": (Matrix(S) + 0.1 * Identity(5), S + 0.1 * torch.eye(5, dtype=torch.float64)),
    "function": (FunctionOperator(lambda V: A @ V, (4, 6), rmatmat=lambda U: A.T @ U), A),
    "symmetric function": (FunctionOperator(lambda V: S @ V, (5, 5), symmetric=True), S),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_products_equal_those_of_the_matrix(name: str):
    operator, matrix = EXPRESSIONS[name]
    m, n = matrix.shape
    assert operator.shape == (m, n)
    assert operator.dtype == torch.float64
    for V in (random(n, seed=3), random(n, 1, seed=4), random(n, 4, seed=5), random(n, 0)):
        torch.testing.assert_close(operator @ V, matrix @ V)
    for U in (random(m, seed=6), random(m, 2, seed=7)):
        torch.testing.assert_close(operator.T @ U, matrix.T @ U)
    for chunk in (1, 2, 64):
        torch.testing.assert_close(operator.to_dense(chunk=chunk), matrix)
    torch.testing.assert_close(operator.T.to_dense(), matrix.T)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_scipy_sees_the_same_matrix(name: str):
    operator, matrix = EXPRESSIONS[name]
    other, dense = operator.to_scipy(), matrix.numpy()
    m, n = dense.shape
    x, u = random(n, seed=3).numpy(), random(m, seed=4).numpy()
    np.testing.assert_allclose(other.matvec(x), dense @ x)
    np.testing.assert_allclose(other.matvec(x[:, None]), (dense @ x)[:, None])
    np.testing.assert_allclose(other.rmatvec(u), dense.T @ u)
    np.testing.assert_allclose(other @ np.eye(n), dense)
    np.testing.assert_allclose(other.T @ np.eye(m), dense.T)
    np.testing.assert_allclose(other.matvec(x.astype(np.float32)), dense @ x, rtol=1e-5)


def test_scipy_finds_eigenvalues():
    found = eigsh(Matrix(S).to_scipy(), k=2, return_eigenvectors=False, v0=np.ones(5))
    np.testing.assert_allclose(np.sort(found), np.linalg.eigvalsh(S.numpy())[-2:])


def test_symmetry_and_definiteness_are_known_where_they_follow():
    symmetric, rectangular = Matrix(S, psd=True), Matrix(A)
    assert symmetric.symmetric
    assert not rectangular.symmetric
    assert not Matrix(random(3, 3)).symmetric
    assert (symmetric + symmetric).symmetric
    assert (symmetric + symmetric).psd
    assert (2 * symmetric).psd
    assert not (-symmetric).psd
    assert not (symmetric - symmetric).psd
    assert (symmetric + Identity(5)).psd
    assert not (symmetric @ Matrix(S + torch.eye(5))).symmetric
    assert symmetric.T is symmetric
    assert rectangular.T.T is rectangular


def test_wrong_combinations_are_refused():
    with pytest.raises(ShapeError, match=r"cannot add operators of shapes \(4, 6\) and \(6, 3\)"):
        Matrix(A) + Matrix(C)
    with pytest.raises(ShapeError, match=r"cannot multiply operators of shapes \(4, 6\) and \(4, 6\)"):
        Matrix(A) @ Matrix(B)
    with pytest.raises(ShapeError, match=r"expected a matrix, got a tensor of shape \(3,\)"):
        Matrix(torch.zeros(3))
    with pytest.raises(UsageError, match="FunctionOperator has no transposed product"):
        FunctionOperator(lambda V: A @ V, (4, 6)).T @ random(4)
    with pytest.raises(UsageError, match=r"Lanczos needs a symmetric operator, got Matrix\(4 × 6"):
        check_square_symmetric(Matrix(A), "Lanczos")
    check_square_symmetric(Matrix(S), "Lanczos")


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (random(5), r"expected a vector of 6 entries or columns \(6, k\), got \(5,\)"),
        (random(1, 6), r"got \(1, 6\)"),
        (random(6, 1, 1), r"got \(6, 1, 1\)"),
        (torch.tensor(1.0), r"got \(\)"),
        (random(6).cfloat(), r"expected torch.float64 on cpu, got torch.complex64 on cpu"),
        (torch.ones(6, dtype=torch.bool), r"expected torch.float64 on cpu, got torch.bool"),
        (np.ones(5), r"expected a vector of 6 entries or columns \(6, k\), got \(5,\)"),
        (np.ones(6, dtype=complex), r"expected an array of real numbers, got one of complex128"),
        (np.array(["a"] * 6), r"expected an array of real numbers"),
        ([1.0] * 6, r"expected a tensor or a NumPy array of 6 entries, got list"),
    ],
)
def test_wrong_vectors_are_refused(vector, message: str):
    with pytest.raises(ShapeError, match=message):
        Matrix(A) @ vector


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_numpy_arrays_are_multiplied_like_tensors(dtype):
    V = np.asarray(random(6, 3).numpy() * 8, dtype=dtype)
    right = A @ torch.tensor(V).double()
    for array in (V, np.asfortranarray(V), V[::-1][::-1]):
        found = Matrix(A) @ array
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, right.numpy(), rtol=1e-14)
    np.testing.assert_allclose(Matrix(A) @ V[:, 1], right[:, 1].numpy(), rtol=1e-14)
    np.testing.assert_allclose(V.T @ Matrix(A).T, right.numpy().T, rtol=1e-14)


@pytest.mark.parametrize("chunk", [0, -1])
def test_no_columns_at_a_time_are_refused(chunk):
    with pytest.raises(UsageError, match="expected a chunk of at least 1 column, got"):
        Matrix(A).to_dense(chunk=chunk)


def test_repr():
    assert repr(Matrix(A).T) == "Transpose(6 × 4, float64, cpu)"
