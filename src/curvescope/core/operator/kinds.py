"""The kinds of vectors that operators take, and give back: the kind that comes out is the kind that went in.

A vector is a tensor or a NumPy array, (n,) or columns (n, k). Where the operator has named blocks it may be a
dictionary of tensors, by the names of parameters or of blocks, or a list or tuple of tensors, one for each
parameter in the module's order. A tensor for a parameter has the parameter's shape, one for a block the
block's; a name that is both means the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace, as_tensor
from curvescope.core.errors import ShapeError, UsageError, near_misses

if TYPE_CHECKING:
    from curvescope.core.operator.base import LinearOperator

Vector = Tensor | np.ndarray | Mapping[str, Tensor] | Sequence[Tensor]


def check_vector(A: LinearOperator, v: Any) -> None:
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
    n, where, space = A.local_shape[1], "" if A.pieces is None else " on this rank", named(A, "columns")
    if v.dim() not in (1, 2) or v.shape[0] != n:
        raise ShapeError(
            f"expected a vector of {n} entries{where} or columns ({n}, k), got {tuple(v.shape)}",
            hint=None if space is None else space.hint,
        )
    if v.dtype != A.dtype or v.device.type != A.device.type:
        raise ShapeError(
            f"expected {A.dtype} on {A.device}, got {v.dtype} on {v.device}",
            hint="v.to(dtype=op.dtype, device=op.device)",
        )


def as_columns(A: LinearOperator, v: Vector) -> Tensor:
    """The columns (n, k) that A is multiplied with, from a vector of any kind.

    Real numbers of any kind are rounded to the operator's dtype. A NumPy array is copied to its device, a
    tensor must be there.
    """
    if isinstance(v, Mapping):
        v = _from_names(v, _columns(A, "a dictionary"))
    elif isinstance(v, list | tuple) and v and all(isinstance(part, Tensor) for part in v):
        v = _from_list(v, _columns(A, f"a {type(v).__name__}"))
    elif isinstance(v, np.ndarray):
        v = as_tensor(v).to(A.device)
    if isinstance(v, Tensor) and not v.is_complex() and v.dtype != torch.bool:
        v = v.to(A.dtype)
    check_vector(A, v)
    assert isinstance(v, Tensor)
    return v[:, None] if v.dim() == 1 else v


def is_single(v: Vector) -> bool:
    """Return True if it is one vector and not several columns."""
    return not isinstance(v, Tensor | np.ndarray) or v.ndim == 1


def in_kind(A: LinearOperator, product: Tensor, v: Vector) -> Any:
    """Columns (m, k) of a product A V as the kind of vector that V was given as.

    If rows have no names, such as the rows of a Jacobian, a product with a dictionary or a list is a tensor.
    """
    if isinstance(v, np.ndarray):
        return (product[:, 0] if v.ndim == 1 else product).cpu().numpy()
    if isinstance(v, Tensor):
        return product[:, 0] if v.ndim == 1 else product
    rows, columns = named(A, "space"), named(A, "columns")
    if rows is None or columns is None:
        return product[:, 0]
    if isinstance(v, Mapping) and not v.keys() <= columns.shapes.keys():
        return rows.to_dict(product[:, 0].contiguous())
    tree = rows.scatter(product[:, 0])
    in_order = [tree[name] for name in rows.shapes]
    return tree if isinstance(v, Mapping) else in_order if isinstance(v, list) else tuple(in_order)


def like(found: Tensor, given: Any) -> Any:
    """A vector that was found, as NumPy if the one that was given is."""
    return found.cpu().numpy() if isinstance(given, np.ndarray) else found


def named(A: LinearOperator, side: str) -> ParamSpace | None:
    """The named blocks of the rows, "space", or of the columns, "columns", of an operator that has them."""
    space = getattr(A, side, None)
    size = A.local_shape[0] if side == "space" else A.local_shape[1]
    return space if isinstance(space, ParamSpace) and space.size == size else None


def _columns(A: LinearOperator, what: str) -> ParamSpace:
    space = named(A, "columns")
    if space is None:
        raise ShapeError(
            f"expected a tensor or a NumPy array of {A.shape[1]} entries, got {what}, "
            f"and {A!r} has no named blocks"
        )
    return space


def _from_names(given: Mapping[str, Tensor], space: ParamSpace) -> Tensor:
    """The vector (n,) of tensors by the names of parameters, or of blocks; every one must be there."""
    blocks = {block.name: block.shape for block in space.blocks}
    by_parameter = given.keys() <= space.shapes.keys()
    known = dict(space.shapes) if by_parameter else blocks
    strange = [name for name in given if name not in space.shapes and name not in blocks]
    if strange:
        raise UsageError(
            f"the operator has no parameter or block called {strange[0]!r}",
            hint=near_misses(str(strange[0]), [*space.shapes, *blocks]),
        )
    if not given.keys() <= known.keys():
        raise UsageError("expected names of parameters or of blocks, got both in one dictionary")
    missing = [name for name in known if name not in given]
    if missing:
        raise ShapeError(
            f"expected a tensor for each of {len(known)} names, but {missing[0]!r} is missing",
            hint="use torch.zeros_like(parameter) for missing ones",
        )
    for name, shape in known.items():
        _check_part(name, given[name], tuple(shape), space)
    tree = {name: part.to(space.dtype) for name, part in given.items()}
    if not by_parameter:
        return space.from_dict(tree)
    vector = space.gather(tree)
    _refuse_outside(tree, vector, space)
    return vector


def _from_list(given: Sequence[Tensor], space: ParamSpace) -> Tensor:
    """The vector (n,) of one tensor for each parameter, in the module's order."""
    if len(given) != len(space.shapes):
        names = list(space.shapes)
        raise ShapeError(
            f"expected {len(names)} tensors, for {names[0]} to {names[-1]} in the module's order, "
            f"got {len(given)}"
        )
    return _from_names(dict(zip(space.shapes, given, strict=True)), space)


def _check_part(name: str, part: Tensor, shape: tuple[int, ...], space: ParamSpace) -> None:
    got = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
    if got != shape:
        raise ShapeError(f"{name}: expected a tensor of {shape}, got {got}")
    if part.is_complex() or part.dtype == torch.bool or part.device.type != space.device.type:
        raise ShapeError(
            f"{name}: expected {space.dtype} on {space.device}, got {part.dtype} on {part.device}"
        )


def _refuse_outside(tree: Mapping[str, Tensor], vector: Tensor, space: ParamSpace) -> None:
    """Raise where a parameter that is in the space in part has entries outside of it."""
    sizes: dict[str, int] = {}
    for block in space.blocks:
        sizes[block.parameter] = sizes.get(block.parameter, 0) + block.size
    partial = [name for name, size in sizes.items() if size < tree[name].numel()]
    if not partial:
        return
    back = space.scatter(vector)
    for name in partial:
        if not torch.equal(back[name], tree[name]):
            raise ShapeError(
                f"{name} has entries that are not zero outside of the operator's blocks",
                hint="name the blocks, or take the operator of all of them",
            )
