"""Explicit operators: dense, diagonal, low-rank, identity, or a function of columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator.base import LinearOperator
from curvescope.core.ranks.shard_layout import VectorShard


def _check_real(A: Tensor, dim: int, what: str) -> None:
    """Raise unless A is a tensor of real numbers with `dim` axes."""
    if not isinstance(A, Tensor):
        raise ShapeError(f"expected {what}, got {type(A).__name__}", hint="torch.as_tensor(array) makes one")
    if A.dim() != dim:
        raise ShapeError(f"expected {what}, got a tensor of shape {tuple(A.shape)}")
    if not A.is_floating_point():
        raise UsageError(f"expected {what} of real numbers, got {A.dtype}", hint="use A.double()")


class Matrix(LinearOperator):
    """A dense matrix as an operator. `symmetric` is determined by comparison if it is None."""

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
    """diag(f(d)) of a vector d (n,), by default diag(d); psd if no entry is negative.

    Every product reads d again, so writing to d changes the operator. With `shard`, d contains this rank's
    entries of a diagonal that is sharded over ranks.
    """

    symmetric = keeps_names = True

    def __init__(
        self, d: Tensor, f: Callable[[Tensor], Tensor] | None = None, *, shard: VectorShard | None = None
    ):
        _check_real(d, 1, "a diagonal")
        self._source, self._f = d, f
        n = len(d) if shard is None else shard.length
        self.shape, self.dtype, self.device = (n, n), d.dtype, d.device
        self.shards = None if shard is None else (shard, shard)

    def shard_like(self, op: LinearOperator) -> Diagonal:
        """Return a diagonal of the same entries that is sharded like the rows of another operator."""
        return self if op.shards is None else Diagonal(self._source, self._f, shard=op.shards[0])

    @property
    def d(self) -> Tensor:
        """Current entries."""
        return self._source if self._f is None else self._f(self._source)

    @property
    def psd(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return True if no entry is negative."""
        return bool((self.d >= 0).all())

    def is_same_as(self, other: LinearOperator) -> bool:
        return isinstance(other, Diagonal) and other._source is self._source and other._f is self._f

    def power(self, exponent: float) -> Diagonal:
        """Return diag(d)^p, entry by entry: `power(-0.5)` is the inverse root. Raise if it is not finite."""
        return self._compose(lambda d: _finite_power(d, exponent))

    def inverse_root(self, damping: float = 0.0) -> Diagonal:
        """(diag(d) + δ I)^(−1/2)."""
        return self._compose(lambda d: _finite_power(d + damping, -0.5))

    def _compose(self, g: Callable[[Tensor], Tensor]) -> Diagonal:
        """Return diag(g(f(d))), which also reads d in every product."""
        f = self._f
        composed = Diagonal(self._source, g if f is None else lambda d: g(f(d)))
        _ = composed.d  # raises now if an entry is not finite
        return composed

    def _matmat(self, V: Tensor) -> Tensor:
        return self.d[:, None] * V


def _finite_power(d: Tensor, exponent: float) -> Tensor:
    powers = d**exponent
    if not bool(torch.isfinite(powers).all()):
        raise UsageError(
            f"diag(d) to the power of {exponent:g} is not finite: the smallest entry is {float(d.min()):.3g}",
            hint="add a number to the diagonal",
        )
    return powers


class LowRank(LinearOperator):
    """U diag(s) Uᵀ for columns U (n, r) and numbers s (r,), by default ones; needs n r entries of memory."""

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
