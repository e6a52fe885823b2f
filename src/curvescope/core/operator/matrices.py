"""Operators that are known by their numbers: dense, diagonal, of low rank, the identity, or a function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator.base import LinearOperator
from curvescope.core.ranks.shard_layout import Pieces


def _check_real(A: Tensor, dim: int, what: str) -> None:
    """Raise unless it is a tensor of real numbers with so many axes."""
    if not isinstance(A, Tensor):
        raise ShapeError(f"expected {what}, got {type(A).__name__}", hint="torch.as_tensor(array) makes one")
    if A.dim() != dim:
        raise ShapeError(f"expected {what}, got a tensor of shape {tuple(A.shape)}")
    if not A.is_floating_point():
        raise UsageError(f"expected {what} of real numbers, got {A.dtype}", hint="use A.double()")


class Matrix(LinearOperator):
    """A dense matrix as an operator. `symmetric` is found by comparison unless stated."""

    def __init__(self, A: Tensor, *, symmetric: bool | None = None, psd: bool = False):
        _check_real(A, 2, "a matrix")
        self.A = A
        self.shape = (A.shape[0], A.shape[1])
        self.dtype, self.device, self.psd = A.dtype, A.device, psd
        square = A.shape[0] == A.shape[1]
        self.symmetric = (square and bool(torch.equal(A, A.T))) if symmetric is None else symmetric

    def is_same_as(self, other: LinearOperator) -> bool:
        return isinstance(other, Matrix) and other.A is self.A

    def _matmat(self, V: Tensor) -> Tensor:
        return self.A @ V

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.A.T @ U


class FunctionOperator(LinearOperator):
    """An operator from a function of columns (n, k) → (m, k)."""

    def __init__(
        self,
        matmat: Callable[[Tensor], Tensor],
        shape: tuple[int, int],
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        symmetric: bool = False,
        psd: bool = False,
        rmatmat: Callable[[Tensor], Tensor] | None = None,
    ):
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.symmetric, self.psd = symmetric, psd
        self._forward, self._backward = matmat, rmatmat

    def _matmat(self, V: Tensor) -> Tensor:
        return self._forward(V)

    def _rmatmat(self, U: Tensor) -> Tensor:
        return super()._rmatmat(U) if self._backward is None else self._backward(U)


class Identity(LinearOperator):
    """The n × n identity; `Identity(n) * λ` is a damping term."""

    symmetric = psd = keeps_names = True

    def __init__(self, n: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"):
        self.shape, self.dtype, self.device = (n, n), dtype, torch.device(device)

    def is_same_as(self, other: LinearOperator) -> bool:
        return isinstance(other, Identity) and other.shape == self.shape

    def _chain(self) -> tuple[float, list[LinearOperator]]:
        return 1.0, []

    def _matmat(self, V: Tensor) -> Tensor:
        return V.clone()


class Diagonal(LinearOperator):
    """diag(f(d)) of a vector d (n,), f the identity unless given; psd where no entry is negative.

    d is read whenever it is asked: numbers that are written into it are those of the next product. With
    `pieces`, d holds the entries that are on this rank of a diagonal that is spread over several.
    """

    symmetric = keeps_names = True

    def __init__(
        self, d: Tensor, f: Callable[[Tensor], Tensor] | None = None, *, pieces: Pieces | None = None
    ):
        _check_real(d, 1, "a diagonal")
        self._source, self._f = d, f
        n = len(d) if pieces is None else pieces.length
        self.shape, self.dtype, self.device = (n, n), d.dtype, d.device
        self.pieces = None if pieces is None else (pieces, pieces)

    def spread_like(self, op: LinearOperator) -> Diagonal:
        """The same entries, over the ranks that the rows of another operator are spread over."""
        return self if op.pieces is None else Diagonal(self._source, self._f, pieces=op.pieces[0])

    @property
    def d(self) -> Tensor:
        """The entries, as they are now."""
        return self._source if self._f is None else self._f(self._source)

    @property
    def psd(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return True if no entry is negative."""
        return bool((self.d >= 0).all())

    def is_same_as(self, other: LinearOperator) -> bool:
        return isinstance(other, Diagonal) and other._source is self._source and other._f is self._f

    def power(self, exponent: float) -> Diagonal:
        """Return diag(d)^p, entry by entry: `power(-0.5)` is the inverse root. Raise if it is not finite."""
        return self._then(lambda d: _finite_power(d, exponent))

    def inverse_root(self, damping: float = 0.0) -> Diagonal:
        """(diag(d) + δ I)^(−1/2)."""
        return self._then(lambda d: _finite_power(d + damping, -0.5))

    def _then(self, g: Callable[[Tensor], Tensor]) -> Diagonal:
        """diag(g(f(d))), which follows d too."""
        f = self._f
        found = Diagonal(self._source, g if f is None else lambda d: g(f(d)))
        _ = found.d  # what is not finite is said now
        return found

    def _matmat(self, V: Tensor) -> Tensor:
        return self.d[:, None] * V


def _finite_power(d: Tensor, exponent: float) -> Tensor:
    found = d**exponent
    if not bool(torch.isfinite(found).all()):
        raise UsageError(
            f"diag(d) to the power of {exponent:g} is not finite: the smallest entry is {float(d.min()):.3g}",
            hint="add a number to the diagonal",
        )
    return found


class LowRank(LinearOperator):
    """U diag(s) Uᵀ for columns U (n, r) and numbers s (r,), ones unless given; memory n r."""

    symmetric = keeps_names = True

    def __init__(self, U: Tensor, s: Tensor | None = None):
        _check_real(U, 2, "columns (n, r)")
        s = torch.ones(U.shape[1], dtype=U.dtype, device=U.device) if s is None else s
        _check_real(s, 1, "numbers (r,)")
        if len(s) != U.shape[1]:
            raise ShapeError(f"expected one number for each of {U.shape[1]} columns, got {len(s)}")
        if s.dtype != U.dtype or s.device.type != U.device.type:
            raise ShapeError(
                f"expected numbers of {U.dtype} on {U.device} as the columns, got {s.dtype} on {s.device}"
            )
        self.U, self.s = U, s
        self.shape, self.dtype, self.device = (len(U), len(U)), U.dtype, U.device
        self.psd = bool((s >= 0).all())

    def _matmat(self, V: Tensor) -> Tensor:
        return self.U @ (self.s[:, None] * (self.U.T @ V))
