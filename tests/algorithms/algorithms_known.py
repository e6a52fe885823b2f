"""Matrices of known spectrum for the tests of the algorithms."""

from __future__ import annotations

import numpy as np
import torch

from curvescope.core.operator import FunctionOperator, LinearOperator, Matrix
from curvescope.core.seeds import generator


def with_spectrum(
    eigenvalues, *, seed: int = 0, dtype: torch.dtype = torch.float64, psd: bool = False
) -> Matrix:
    """Q diag(λ) Qᵀ with a random orthogonal Q."""
    values = torch.as_tensor(np.asarray(eigenvalues, dtype=float))
    n = len(values)
    Q = torch.linalg.qr(torch.randn(n, n, generator=generator(seed, n), dtype=torch.float64))[0]
    A = (Q * values) @ Q.T
    return Matrix(((A + A.T) / 2).to(dtype), symmetric=True, psd=psd)


def uniform(low: float, high: float, count: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, count)


def diagonal_operator(n: int, eigenvalues, *, bulk: float = 0.0, dtype: torch.dtype = torch.float32):
    """The given eigenvalues at random places of a diagonal, `bulk` at all others."""
    d = torch.full((n,), bulk, dtype=dtype)
    d[torch.randperm(n, generator=generator(n))[: len(eigenvalues)]] = torch.as_tensor(
        eigenvalues, dtype=dtype
    )
    return FunctionOperator(lambda V: d[:, None] * V, (n, n), dtype=dtype, symmetric=True)


def low_rank_operator(n: int, eigenvalues, *, shift: float = 0.0, dtype: torch.dtype = torch.float32):
    """U diag(λ) Uᵀ + shift · I with random orthonormal columns U."""
    values = torch.as_tensor(eigenvalues, dtype=dtype)
    U = torch.randn(n, len(values), generator=generator(n), dtype=torch.float64)
    U = torch.linalg.qr(U)[0].to(dtype)
    return FunctionOperator(
        lambda V: U @ (values[:, None] * (U.T @ V)) + shift * V, (n, n), dtype=dtype, symmetric=True
    )


def wanted(eigenvalues: np.ndarray, k: int, which: str) -> np.ndarray:
    """The k eigenvalues that eigsh should find, in its order."""
    ascending = np.sort(eigenvalues)
    if which == "LA":
        return ascending[::-1][:k]
    if which == "SA":
        return ascending[:k]
    if which == "LM":
        return ascending[np.argsort(-np.abs(ascending), kind="stable")][:k]
    return np.r_[ascending[: k // 2], ascending[len(ascending) - (k - k // 2) :]]


class Counting(LinearOperator):
    """Another operator, counting the columns it has been multiplied with and the widest batch."""

    def __init__(self, inner: LinearOperator):
        self.inner, self.columns, self.calls, self.widest = inner, 0, 0, 0
        self.shape, self.dtype, self.device = inner.shape, inner.dtype, inner.device
        self.symmetric, self.psd = inner.symmetric, inner.psd

    def _count(self, V):
        self.columns, self.calls = self.columns + V.shape[1], self.calls + 1
        self.widest = max(self.widest, V.shape[1])

    def _matmat(self, V):
        self._count(V)
        return self.inner._matmat(V)

    def _rmatmat(self, U):
        self._count(U)
        return self.inner._rmatmat(U)


SPECTRA = {
    "outliers": np.r_[100.0, 50, 20, 10, 5, 4, 3, uniform(-1, 1, 193)],
    "repeated": np.r_[[10.0] * 5, [9.0] * 5, [-8.0] * 5, uniform(-1, 1, 185)],
    "clustered": np.r_[5 + 1e-6 * np.arange(5), -5 - 1e-6 * np.arange(5), uniform(-1, 1, 190)],
    "indefinite": np.r_[-7.0, -7, 7, 7, uniform(-1, 1, 196)],
    "rank three": np.r_[3.0, 2, -1, np.zeros(197)],
    "zero": np.zeros(200),
    "identity": np.ones(200),
    "even": np.linspace(0, 1, 200),
    "normal": np.random.default_rng(0).standard_normal(200),
    "n = 1": np.array([-2.5]),
    "n = 2": np.array([1.0, 3.0]),
    "small": uniform(-1, 1, 30),
}
