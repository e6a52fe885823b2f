"""Linear operators: the interface between networks and algorithms.

An operator A is an m × n matrix that is defined by its products. `A @ v` takes a vector `(n,)` or columns
`(n, k)` of any kind in `kinds.py`, and returns the same kind. Sums, products, multiples, transposes and
submatrices are lazy. They are marked symmetric or positive semi-definite if this follows from their parts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace, by_role
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import exports
from curvescope.core.operator.index import Index, named_rows, positions
from curvescope.core.operator.kinds import as_columns, columns_as_kind, named_space
from curvescope.core.progress import track
from curvescope.core.ranks.shard_layout import VectorShard

if TYPE_CHECKING:
    from curvlinops._torch_base import PyTorchLinearOperator
    from hessian_eigenthings.operators.base import CurvatureOperator
    from linear_operator.operators import LinearOperator as GPyTorchOperator
    from scipy.sparse.linalg import LinearOperator as ScipyOperator


class LinearOperator(ABC):
    """An m × n matrix that is defined by its products with columns.

    Subclasses set `shape, dtype, device, symmetric, psd` and implement `_matmat` and, unless they are
    symmetric, `_rmatmat`. An operator with named blocks sets `space` for its rows, and `columns`.

    If vectors are sharded over ranks, `shape` is the shape of the full matrix. Vectors and spaces contain
    only this rank's entries; `local_shape` counts them.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    symmetric: bool = False
    psd: bool = False
    shards: tuple[VectorShard, VectorShard] | None = None  # of rows and columns, if vectors are sharded
    keeps_names: bool = False  # entry i of a product has the name of entry i of the vector

    @property
    def local_shape(self) -> tuple[int, int]:
        """Numbers of rows and columns on this rank: `shape`, unless vectors are sharded."""
        return self.shape if self.shards is None else (self.shards[0].size, self.shards[1].size)

    @abstractmethod
    def _matmat(self, V: Tensor) -> Tensor:
        """Return A V for V of shape (n, k), already checked."""

    def _rmatmat(self, U: Tensor) -> Tensor:
        """Return Aᵀ U for U of shape (m, k), already checked."""
        if self.symmetric:
            return self._matmat(U)
        raise UsageError(f"{type(self).__name__} has no transposed product")

    __array_ufunc__ = None  # otherwise NumPy evaluates v @ A element by element

    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, other: np.ndarray) -> np.ndarray: ...
    @overload
    def __matmul__(self, other: LinearOperator) -> LinearOperator: ...
    @overload
    def __matmul__(self, other: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    @overload
    def __matmul__(self, other: list[Tensor]) -> list[Tensor]: ...
    @overload
    def __matmul__(self, other: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...
    def __matmul__(self, other: Any) -> Any:
        """Return A v as the same kind of vector as v (`kinds.py`), or the product of two operators."""
        if isinstance(other, LinearOperator):
            return Product(self, other)
        return columns_as_kind(self, self._matmat(as_columns(self, other)), other)

    @overload
    def __rmatmul__(self, other: Tensor) -> Tensor: ...
    @overload
    def __rmatmul__(self, other: np.ndarray) -> np.ndarray: ...
    @overload
    def __rmatmul__(self, other: Any) -> Any: ...
    def __rmatmul__(self, other: Any) -> Any:
        """Return x A = (Aᵀ xᵀ)ᵀ for a vector (m,) or rows (k, m), as the same kind as x."""
        rows = isinstance(other, Tensor | np.ndarray) and other.ndim == 2
        if rows and other.shape[1] != self.local_shape[0]:
            m = self.local_shape[0]
            raise ShapeError(
                f"expected a vector of {m} entries or rows (k, {m}) to the left, got {tuple(other.shape)}"
            )
        return (self.T @ other.T).T if rows else self.T @ other

    @property
    def T(self) -> LinearOperator:
        """Transpose; the operator itself if it is symmetric."""
        return self if self.symmetric else Transpose(self)

    def __add__(self, other: LinearOperator) -> LinearOperator:
        return Sum(self, other)

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        return Sum(self, Scaled(other, -1.0) if isinstance(other, LinearOperator) else other)

    def __mul__(self, factor: float) -> LinearOperator:
        return Scaled(self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> LinearOperator:
        divisor = number(divisor)
        if divisor == 0 or not math.isfinite(1 / divisor):
            raise UsageError(f"cannot divide an operator by {divisor!r}")
        return Scaled(self, 1 / divisor)

    def __neg__(self) -> LinearOperator:
        return Scaled(self, -1.0)

    def submatrix(self, rows: Index, columns: Index | None = None) -> LinearOperator:
        """Return the selected rows and columns, in the given order.

        Args:
            rows: A slice, a number, a list, array or tensor of numbers (from the end if negative) or a mask
                of booleans; or names and globs of blocks, if the operator has blocks.
            columns: Selected like rows; the same as `rows` by default.
        """
        left = self._selection(rows, "space", 0)
        right = left if columns is None and self.symmetric else None
        if right is None:
            right = self._selection(rows if columns is None else columns, "columns", 1)
        return left.T @ self @ right

    def __getitem__(self, index: Any) -> LinearOperator:
        """Return `submatrix(rows, columns)`; A[rows] has all columns, as in NumPy."""
        rows, columns = index if isinstance(index, tuple) and len(index) == 2 else (index, slice(None))
        return self.submatrix(rows, columns)

    __iter__ = None  # otherwise __getitem__ would make it iterable

    def _selection(self, index: Index, side: str, axis: int) -> Selection:
        if self.shards is not None:
            raise UsageError(
                "a submatrix does not support vectors that are sharded over ranks", hint="op.block(name)"
            )
        names = [index] if isinstance(index, str) else index
        if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
            index = named_rows(repr(self), named_space(self, side), [str(name) for name in names])
        return Selection(self.shape[axis], index, dtype=self.dtype, device=self.device)

    def in_blocks(self) -> LinearOperator:
        """Return the operator with rows and columns in block order; itself if it has no blocks.

        Vectors over all parameters of a problem are in torch's order, in which a block need not be
        contiguous. Algorithms that treat blocks separately use this operator.
        """
        rows, columns = named_space(self, "space"), named_space(self, "columns")
        if not any(space is not None and space.whole for space in (rows, columns)):
            return self
        left, right = (self._block_permutation(space, axis) for axis, space in enumerate((rows, columns)))
        reordered = left.T @ self @ (left if self.symmetric else right)
        for side, space in (("space", rows), ("columns", columns)):
            if space is not None:
                setattr(reordered, side, space.in_blocks())
        return reordered

    def _block_permutation(self, space: ParamSpace | None, axis: int) -> LinearOperator:
        """Permutation of entries from block order to the order of a space."""
        index = slice(None) if space is None else torch.cat([space.positions(block) for block in space])
        return self._selection(index, "space" if axis == 0 else "columns", axis)

    def is_same_as(self, other: LinearOperator) -> bool:
        """Return True if both are the same matrix by construction; False if that is unknown."""
        return self is other

    def is_transpose_of(self, other: LinearOperator) -> bool:
        """Return True if this is the transpose of the other by construction; False if that is not known."""
        if isinstance(other, Transpose):
            return self.is_same_as(other.A)
        return self.symmetric and self.is_same_as(other)

    def _chain(self) -> tuple[float, list[LinearOperator]]:
        """Number and operators of which this operator is the product."""
        return 1.0, [self]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Declare that the matrix does not change inside, for example during an algorithm.

        Operators with caches then check for changes once instead of before every product. A composite
        operator freezes its parts.
        """
        with ExitStack() as parts:
            for part in vars(self).values():
                if isinstance(part, LinearOperator):
                    parts.enter_context(part.frozen())
            yield

    def to_dense(self, *, chunk: int = 64) -> Tensor:
        """Return the matrix (m, n), from products with `chunk` columns of the identity at a time."""
        if chunk < 1:
            raise UsageError(f"expected a chunk of at least 1 column, got {chunk}")
        m, n = self.shape
        out = torch.zeros(m, n, dtype=self.dtype, device=self.device)
        rows, columns = (slice(None), slice(None)) if self.shards is None else _positions(self.shards)
        for start in track(range(0, n, chunk), "columns of the matrix"):
            stop = min(start + chunk, n)
            basis = torch.zeros(n, stop - start, dtype=self.dtype, device=self.device)
            basis[torch.arange(start, stop), torch.arange(stop - start)] = 1
            out[rows, start:stop] = self._matmat(basis[columns])
        return out if self.shards is None else self.shards[0].spread.sum(out)

    def to_scipy(self) -> ScipyOperator:
        """Return the same operator for SciPy's solvers, on NumPy vectors."""
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        def numpy_product(product: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
            def apply(columns: Any) -> Any:
                columns = np.asarray(columns)
                V = torch.tensor(columns.reshape(columns.shape[0], -1), dtype=self.dtype, device=self.device)
                return product(V).cpu().numpy().reshape(-1, *columns.shape[1:])

            return apply

        forward, backward = numpy_product(self._matmat), numpy_product(self._rmatmat)
        numpy_dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        # SciPy's annotations do not say that its __new__ returns the function-based subclass.
        make: Any = ScipyOperator
        return make(
            self.shape, matvec=forward, rmatvec=backward, matmat=forward, rmatmat=backward, dtype=numpy_dtype
        )

    def to_curvlinops(self) -> PyTorchLinearOperator:
        """Return the same operator for curvlinops, on flat vectors."""
        return exports.to_curvlinops(self)

    def to_linear_operator(self) -> GPyTorchOperator:
        """Return the same operator for GPyTorch's linear_operator: its solvers and log determinants."""
        return exports.to_linear_operator(self)

    def to_eigenthings(self) -> CurvatureOperator:
        """Return the same operator for the algorithms of hessian-eigenthings; it must be symmetric."""
        check_square_symmetric(self, "hessian-eigenthings")
        return exports.to_eigenthings(self)

    def _repr_html_(self) -> str:
        """HTML for a notebook: shape, kind, parts, and rows by role, without computing a product."""
        from curvescope.viz import notebook

        operands = {name: part for name, part in vars(self).items() if isinstance(part, LinearOperator)}
        space = named_space(self, "space")
        return notebook.box(
            self,
            repr(self),
            lambda: notebook.facts({"symmetric": self.symmetric, "positive semi-definite": self.psd}),
            lambda: notebook.facts(operands),
            lambda: notebook.blocks(by_role(space)) if space is not None else "",
        )

    def __repr__(self) -> str:
        m, n = self.shape
        return f"{type(self).__name__}({m} × {n}, {str(self.dtype).removeprefix('torch.')}, {self.device})"


class Sum(LinearOperator):
    """A + B; symmetric if both are, or if B is Aᵀ."""

    def __init__(self, A: LinearOperator, B: LinearOperator):
        if not isinstance(B, LinearOperator):
            raise UsageError(
                f"cannot add a {type(B).__name__} to an operator",
                hint="Identity(n) * number shifts by a number",
            )
        if A.shape != B.shape:
            raise ShapeError(f"cannot add operators of shapes {A.shape} and {B.shape}")
        check_same_dtype_and_device(A, B, "add")
        self.A, self.B = A, B
        self.shape, self.dtype, self.device = A.shape, A.dtype, A.device
        self.shards = _combined_shards(A, B)
        self.symmetric = (A.symmetric and B.symmetric) or A.is_transpose_of(B)
        self.psd, self.keeps_names = A.psd and B.psd, A.keeps_names and B.keeps_names
        for side in ("space", "columns"):
            spaces = [space for x in (A, B) if (space := named_space(x, side)) is not None]
            if spaces and spaces[0] == spaces[-1]:
                setattr(self, side, spaces[0])

    @property
    def T(self) -> LinearOperator:
        return self if self.symmetric else Sum(self.A.T, self.B.T)

    def in_blocks(self) -> LinearOperator:
        if any(
            named_space(x, side) != named_space(self, side)
            for x in (self.A, self.B)
            for side in ("space", "columns")
        ):
            return super().in_blocks()
        A, B = self.A.in_blocks(), self.B.in_blocks()
        return self if A is self.A and B is self.B else Sum(A, B)

    def is_same_as(self, other: LinearOperator) -> bool:
        if not isinstance(other, Sum):
            return False
        return self is other or (self.A.is_same_as(other.A) and self.B.is_same_as(other.B))

    def is_transpose_of(self, other: LinearOperator) -> bool:
        if self.symmetric or not isinstance(other, Sum):
            return super().is_transpose_of(other)
        return self.A.is_transpose_of(other.A) and self.B.is_transpose_of(other.B)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.A._matmat(V) + self.B._matmat(V)

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.A._rmatmat(U) + self.B._rmatmat(U)


class Scaled(LinearOperator):
    """c A for a number c."""

    def __init__(self, A: LinearOperator, factor: float):
        self.A, self.factor = A, number(factor)
        self.shape, self.dtype, self.device, self.shards = A.shape, A.dtype, A.device, A.shards
        self.symmetric, self.psd, self.keeps_names = A.symmetric, A.psd and self.factor >= 0, A.keeps_names
        _set_spaces(self, rows=A, columns=A)

    @property
    def T(self) -> LinearOperator:
        return self if self.symmetric else Scaled(self.A.T, self.factor)

    def in_blocks(self) -> LinearOperator:
        reordered = self.A.in_blocks()
        return self if reordered is self.A else Scaled(reordered, self.factor)

    def is_same_as(self, other: LinearOperator) -> bool:
        return isinstance(other, Scaled) and self.factor == other.factor and self.A.is_same_as(other.A)

    def is_transpose_of(self, other: LinearOperator) -> bool:
        return isinstance(other, Scaled) and self.factor == other.factor and self.A.is_transpose_of(other.A)

    def _chain(self) -> tuple[float, list[LinearOperator]]:
        factor, chain = self.A._chain()
        return self.factor * factor, chain

    def _matmat(self, V: Tensor) -> Tensor:
        return self.A._matmat(V) * self.factor

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.A._rmatmat(U) * self.factor


class Product(LinearOperator):
    """A B, applied from the right.

    It is symmetric if the factors from the left are the transposed factors from the right, as in D H D, PᵀAP
    and JᵀJ. Then it is positive semi-definite if its scalar factor is ≥ 0 and the middle factor, if there is
    one, is positive semi-definite.
    """

    def __init__(self, A: LinearOperator, B: LinearOperator):
        if A.shape[1] != B.shape[0]:
            raise ShapeError(f"cannot multiply operators of shapes {A.shape} and {B.shape}")
        check_same_dtype_and_device(A, B, "multiply")
        self.A, self.B = A, B
        self.shape, self.dtype, self.device = (A.shape[0], B.shape[1]), A.dtype, A.device
        self.shards = _combined_shards(A, B)
        factor, chain = self._chain()
        half = len(chain) // 2
        mirrored = all(f.is_transpose_of(g) for f, g in zip(chain[:half], reversed(chain), strict=False))
        middle = chain[half] if len(chain) % 2 else None
        self.symmetric = mirrored and (middle is None or middle.symmetric)
        self.psd = self.symmetric and (middle is None or middle.psd) and factor >= 0
        self.keeps_names = A.keeps_names and B.keeps_names
        _set_spaces(self, rows=B if A.keeps_names else A, columns=A if B.keeps_names else B)

    @property
    def T(self) -> LinearOperator:
        return self if self.symmetric else Product(self.B.T, self.A.T)

    def is_same_as(self, other: LinearOperator) -> bool:
        if not isinstance(other, Product):
            return False
        (c, factors), (d, other_factors) = self._chain(), other._chain()
        return (
            c == d
            and len(factors) == len(other_factors)
            and all(map(lambda f, g: f.is_same_as(g), factors, other_factors))
        )

    def is_transpose_of(self, other: LinearOperator) -> bool:
        if not isinstance(other, Product):
            return False
        (c, factors), (d, other_factors) = self._chain(), other._chain()
        back = reversed(other_factors)
        return (
            c == d
            and len(factors) == len(other_factors)
            and all(map(lambda f, g: f.is_transpose_of(g), factors, back))
        )

    def _chain(self) -> tuple[float, list[LinearOperator]]:
        (c, left), (d, right) = self.A._chain(), self.B._chain()
        return c * d, left + right

    def _matmat(self, V: Tensor) -> Tensor:
        return self.A._matmat(self.B._matmat(V))

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.B._rmatmat(self.A._rmatmat(U))


class Transpose(LinearOperator):
    """Aᵀ of an operator that is not symmetric."""

    def __init__(self, A: LinearOperator):
        self.A = A
        self.shape, self.dtype, self.device = (A.shape[1], A.shape[0]), A.dtype, A.device
        self.shards = None if A.shards is None else (A.shards[1], A.shards[0])
        for side, other in (("space", "columns"), ("columns", "space")):
            if (space := named_space(A, other)) is not None:
                setattr(self, side, space)

    @property
    def T(self) -> LinearOperator:
        return self.A

    def is_same_as(self, other: LinearOperator) -> bool:
        return isinstance(other, Transpose) and self.A.is_same_as(other.A)

    def is_transpose_of(self, other: LinearOperator) -> bool:
        return self.A.is_same_as(other)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.A._rmatmat(V)

    def _rmatmat(self, U: Tensor) -> Tensor:
        return self.A._matmat(U)


class Selection(LinearOperator):
    """E (n × k), whose columns are the unit vectors of the chosen entries: Eᵀ x = x[index]."""

    def __init__(self, n: int, index: Any, *, dtype: torch.dtype, device: torch.device):
        self.index = positions(n, index).to(device)
        self.shape, self.dtype, self.device = (n, len(self.index)), dtype, device

    def is_same_as(self, other: LinearOperator) -> bool:
        return (
            isinstance(other, Selection)
            and self.shape[0] == other.shape[0]
            and torch.equal(self.index, other.index)
        )

    def _matmat(self, V: Tensor) -> Tensor:
        return V.new_zeros(self.shape[0], V.shape[1]).index_add_(0, self.index, V)

    def _rmatmat(self, U: Tensor) -> Tensor:
        return U[self.index]


def _positions(shards: tuple[VectorShard, VectorShard]) -> tuple[Any, Any]:
    return shards[0].positions(), shards[1].positions()


def _combined_shards(A: LinearOperator, B: LinearOperator) -> tuple[VectorShard, VectorShard] | None:
    """Shards of a sum or product; raise if the vectors of only one operator are sharded."""
    if (A.shards is None) != (B.shards is None):
        raise ShapeError(
            f"cannot combine {A!r} and {B!r}: the vectors of one of them are sharded over ranks",
            hint="damping=λ and weight_decay=w of an operator add a diagonal",
        )
    return None if A.shards is None or B.shards is None else (A.shards[0], B.shards[1])


def _set_spaces(op: LinearOperator, *, rows: LinearOperator, columns: LinearOperator) -> None:
    """Give an operator the row names of one operator and the column names of another."""
    for side, source in (("space", rows), ("columns", columns)):
        if (space := named_space(source, side)) is not None:
            setattr(op, side, space)


def check_square_symmetric(A: LinearOperator, what: str) -> None:
    """Raise unless A is square and declared symmetric."""
    if A.shape[0] != A.shape[1] or not A.symmetric:
        raise UsageError(
            f"{what} needs a symmetric operator, got {A!r} with symmetric={A.symmetric}",
            hint="a block with the same rows and columns, op.block(name), is symmetric",
        )


def number(factor: Any) -> float:
    """Convert to a finite real number or raise."""
    value = math.nan
    if not isinstance(factor, complex | str) and not (isinstance(factor, Tensor) and factor.is_complex()):
        with suppress(TypeError, ValueError, RuntimeError):
            value = float(factor)
    if not math.isfinite(value):
        got = f"a tensor of {tuple(factor.shape)}" if isinstance(factor, Tensor) else repr(factor)
        raise UsageError(
            f"expected a finite real number to multiply an operator with, got {got}",
            hint="A @ B multiplies operators, Diagonal(d) @ A scales rows",
        )
    return value


def check_same_dtype_and_device(A: LinearOperator, B: LinearOperator, verb: str) -> None:
    """Raise unless both operators have the same dtype and type of device."""
    if A.dtype != B.dtype or A.device.type != B.device.type:
        raise ShapeError(
            f"cannot {verb} operators of {A.dtype} on {A.device} and of {B.dtype} on {B.device}",
            hint="make both with the same dtype and device",
        )
