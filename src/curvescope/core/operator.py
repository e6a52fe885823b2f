"""Linear operators: what algorithms see of a network.

An operator A is m × n and known by its products. `A @ v` takes a vector `(n,)` or columns `(n, k)`
and returns `(m,)` or `(m, k)`. Sums, products, multiples and transposes are lazy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator as ScipyOperator


class LinearOperator(ABC):
    """An m × n matrix known by its products with columns.

    Subclasses set `shape, dtype, device, symmetric, psd` and implement `_matmat` and, unless they are
    symmetric, `_rmatmat`.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    symmetric: bool = False
    psd: bool = False

    @abstractmethod
    def _matmat(self, V: Tensor) -> Tensor:
        """A V for V of shape (n, k), already checked."""

    def _rmatmat(self, U: Tensor) -> Tensor:
        """Aᵀ U for U of shape (m, k), already checked."""
        if self.symmetric:
            return self._matmat(U)
        raise UsageError(f"{type(self).__name__} has no transposed product")

    __array_ufunc__ = None  # so that NumPy does not take v @ A apart

    @overload
    def __matmul__(self, other: Tensor | np.ndarray) -> Tensor: ...
    @overload
    def __matmul__(self, other: LinearOperator) -> LinearOperator: ...
    def __matmul__(self, other: Tensor | np.ndarray | LinearOperator) -> Tensor | LinearOperator:
        """A v as a tensor, for a vector or columns of torch or NumPy, or the product of two operators."""
        if isinstance(other, LinearOperator):
            return Product(self, other)
        product = self._matmat(as_columns(self, other))
        return product[:, 0] if other.ndim == 1 else product

    @property
    def T(self) -> LinearOperator:
        """The transpose; the operator itself when it is symmetric."""
        return self if self.symmetric else Transpose(self)

    def __add__(self, other: LinearOperator) -> LinearOperator:
        return Sum(self, other)

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return Sum(self, Scaled(other, -1.0))

    def __mul__(self, factor: float) -> LinearOperator:
        return Scaled(self, float(factor))

    __rmul__ = __mul__

    def __neg__(self) -> LinearOperator:
        return Scaled(self, -1.0)

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Products inside belong together, as those of an algorithm: they are products of one matrix.

        Whoever keeps something between products gives its guarantee once for all of them; an operator that
        is made of others asks each of them.
        """
        with ExitStack() as parts:
            for part in vars(self).values():
                if isinstance(part, LinearOperator):
                    parts.enter_context(part.steady())
            yield

    def dense(self, *, chunk: int = 64) -> Tensor:
        """The matrix itself, (m, n), from products with `chunk` columns of the identity at a time."""
        if chunk < 1:
            raise UsageError(f"expected a chunk of at least 1 column, got {chunk}")
        m, n = self.shape
        out = torch.empty(m, n, dtype=self.dtype, device=self.device)
        for start in range(0, n, chunk):
            stop = min(start + chunk, n)
            basis = torch.zeros(n, stop - start, dtype=self.dtype, device=self.device)
            basis[torch.arange(start, stop), torch.arange(stop - start)] = 1
            out[:, start:stop] = self._matmat(basis)
        return out

    def to_scipy(self) -> ScipyOperator:
        """The same operator for SciPy's solvers, on numpy vectors."""
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        def numpy_product(product: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
            def apply(columns: Any) -> Any:
                columns = np.asarray(columns)
                V = torch.tensor(columns.reshape(columns.shape[0], -1), dtype=self.dtype, device=self.device)
                return product(V).cpu().numpy().reshape(-1, *columns.shape[1:])

            return apply

        forward, backward = numpy_product(self._matmat), numpy_product(self._rmatmat)
        numpy_dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        # SciPy's __new__ picks the function-based subclass, which its annotations do not say.
        make: Any = ScipyOperator
        return make(
            self.shape, matvec=forward, rmatvec=backward, matmat=forward, rmatmat=backward, dtype=numpy_dtype
        )

    def __repr__(self) -> str:
        m, n = self.shape
        return f"{type(self).__name__}({m} × {n}, {str(self.dtype).removeprefix('torch.')}, {self.device})"


def check_vector(A: LinearOperator, v: Tensor) -> None:
    """Raise unless A @ v is defined: a plain tensor of the right length, dtype and device."""
    if not isinstance(v, Tensor):
        raise ShapeError(
            f"expected a tensor or a NumPy array of {A.shape[1]} entries, got {type(v).__name__}",
            hint="torch.as_tensor(v) makes a tensor",
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(v):  # pyright: ignore[reportAttributeAccessIssue]
        raise UsageError(
            "expected a plain vector, got one inside a transform of torch.func",
            hint="op @ V takes columns (n, k) at once; op is linear, so its derivative along u is op @ u",
        )
    if v.dim() not in (1, 2) or v.shape[0] != A.shape[1]:
        raise ShapeError(
            f"expected a vector of {A.shape[1]} entries or columns ({A.shape[1]}, k), got {tuple(v.shape)}",
            hint="op.space.gather(tree) makes a vector from parameters",
        )
    if v.dtype != A.dtype or v.device.type != A.device.type:
        raise ShapeError(
            f"expected {A.dtype} on {A.device}, got {v.dtype} on {v.device}",
            hint="v.to(dtype=op.dtype, device=op.device)",
        )


def as_columns(A: LinearOperator, v: Tensor | np.ndarray) -> Tensor:
    """The columns (n, k) that A is multiplied with, from a vector or columns, of torch or NumPy.

    Real numbers of any kind are rounded to the operator's dtype. A NumPy array is copied to its device, a
    tensor must be there.
    """
    if isinstance(v, np.ndarray):
        if v.dtype.kind not in "fiu":
            raise ShapeError(f"expected an array of real numbers, got one of {v.dtype}")
        plain = v.dtype.newbyteorder("=") if v.dtype.itemsize <= 8 else np.dtype(np.float64)  # torch's own
        v = torch.tensor(np.ascontiguousarray(v, dtype=plain)).to(A.device)
    if isinstance(v, Tensor) and not v.is_complex() and v.dtype != torch.bool:
        v = v.to(A.dtype)
    check_vector(A, v)
    return v[:, None] if v.dim() == 1 else v


def check_square_symmetric(A: LinearOperator, what: str) -> None:
    """Raise unless A is square and declared symmetric."""
    if A.shape[0] != A.shape[1] or not A.symmetric:
        raise UsageError(
            f"{what} needs a symmetric operator, got {A!r} with symmetric={A.symmetric}",
            hint="a block with the same rows and columns, op.block(name), is symmetric",
        )


class Matrix(LinearOperator):
    """A dense matrix as an operator. `symmetric` is found by comparison unless stated."""

    def __init__(self, A: Tensor, *, symmetric: bool | None = None, psd: bool = False):
        if A.dim() != 2:
            raise ShapeError(f"expected a matrix, got a tensor of shape {tuple(A.shape)}")
        self.A = A
        self.shape = (A.shape[0], A.shape[1])
        self.dtype, self.device, self.psd = A.dtype, A.device, psd
        square = A.shape[0] == A.shape[1]
        self.symmetric = (square and bool(torch.equal(A, A.T))) if symmetric is None else symmetric

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

    symmetric = psd = True

    def __init__(self, n: int, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"):
        self.shape, self.dtype, self.device = (n, n), dtype, torch.device(device)

    def _matmat(self, V: Tensor) -> Tensor:
        return V.clone()


class Sum(LinearOperator):
    """A + B."""

    def __init__(self, A: LinearOperator, B: LinearOperator):
        if not isinstance(B, LinearOperator):
            raise UsageError(
                f"cannot add a {type(B).__name__} to an operator",
                hint="Identity(n) * number shifts by a number",
            )
        if A.shape != B.shape:
            raise ShapeError(f"cannot add operators of shapes {A.shape} and {B.shape}")
        self.A, self.B = A, B
        self.shape, self.dtype, self.device = A.shape, A.dtype, A.device
        self.symmetric, self.psd = A.symmetric and B.symmetric, A.psd and B.psd

    def _matmat(self, V: Tensor) -> Tensor:
        return self.A._matmat(V) + self.B._matmat(V)

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.A._rmatmat(U) + self.B._rmatmat(U)


class Scaled(LinearOperator):
    """c A for a number c."""

    def __init__(self, A: LinearOperator, factor: float):
        self.A, self.factor = A, factor
        self.shape, self.dtype, self.device = A.shape, A.dtype, A.device
        self.symmetric, self.psd = A.symmetric, A.psd and factor >= 0

    def _matmat(self, V: Tensor) -> Tensor:
        return self.A._matmat(V) * self.factor

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.A._rmatmat(U) * self.factor


class Product(LinearOperator):
    """A B, applied from the right."""

    def __init__(self, A: LinearOperator, B: LinearOperator):
        if A.shape[1] != B.shape[0]:
            raise ShapeError(f"cannot multiply operators of shapes {A.shape} and {B.shape}")
        self.A, self.B = A, B
        self.shape, self.dtype, self.device = (A.shape[0], B.shape[1]), A.dtype, A.device

    def _matmat(self, V: Tensor) -> Tensor:
        return self.A._matmat(self.B._matmat(V))

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.B._rmatmat(self.A._rmatmat(U))


class Transpose(LinearOperator):
    """Aᵀ of an operator that is not symmetric."""

    def __init__(self, A: LinearOperator):
        self.A = A
        self.shape, self.dtype, self.device = (A.shape[1], A.shape[0]), A.dtype, A.device

    @property
    def T(self) -> LinearOperator:
        return self.A

    def _matmat(self, V: Tensor) -> Tensor:
        return self.A._rmatmat(V)

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.A._matmat(U)
