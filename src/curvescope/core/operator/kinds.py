"""Kinds of vectors that operators take; a product has the same kind as the vector.

A vector is a tensor or a NumPy array, (n,) or columns (n, k). If the operator has named blocks, a vector may
also be a dictionary of tensors by the names of parameters or of blocks, or a list or tuple with one tensor
for each parameter in the module's order. A tensor has the shape of its parameter or block. A name that is
both means the parameter.
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
    """Raise unless v is a plain tensor of the length, dtype and device that A needs."""
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
    n, suffix, space = (
        A.local_shape[1],
        "" if A.shards is None else " on this rank",
        named_space(A, "columns"),
    )
    if v.dim() not in (1, 2) or v.shape[0] != n:
        raise ShapeError(
            f"expected a vector of {n} entries{suffix} or columns ({n}, k), got {tuple(v.shape)}",
            hint=None if space is None else space.hint,
        )
    if v.dtype != A.dtype or v.device.type != A.device.type:
        raise ShapeError(
            f"expected {A.dtype} on {A.device}, got {v.dtype} on {v.device}",
            hint="v.to(dtype=op.dtype, device=op.device)",
        )


def as_columns(A: LinearOperator, v: Vector) -> Tensor:
    """Convert a vector of any kind to columns (n, k) for a product with A.

    Real numbers are rounded to the operator's dtype. A NumPy array is copied to the operator's device; a
    tensor must already be there.
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


def is_single_vector(v: Vector) -> bool:
    """Return True if v is one vector and not several columns."""
    return not isinstance(v, Tensor | np.ndarray) or v.ndim == 1


def columns_as_kind(A: LinearOperator, product: Tensor, v: Vector) -> Any:
    """Convert columns (m, k) of a product A V to the kind of v, the vector before conversion to columns.

    If the rows of A have no names, such as the rows of a Jacobian, a product with a dictionary or a list is a
    tensor.
    """
    if isinstance(v, np.ndarray):
        return (product[:, 0] if v.ndim == 1 else product).cpu().numpy()
    if isinstance(v, Tensor):
        return product[:, 0] if v.ndim == 1 else product
    rows, columns = named_space(A, "space"), named_space(A, "columns")
    if rows is None or columns is None:
        return product[:, 0]
    if isinstance(v, Mapping) and not v.keys() <= columns.shapes.keys():
        return rows.to_dict(product[:, 0].contiguous())
    tree = rows.scatter(product[:, 0])
    in_order = [tree[name] for name in rows.shapes]
    return tree if isinstance(v, Mapping) else in_order if isinstance(v, list) else tuple(in_order)


def as_kind(vector: Tensor, original: Any) -> Any:
    """Convert a tensor to NumPy if the original vector is a NumPy array."""
    return vector.cpu().numpy() if isinstance(original, np.ndarray) else vector


def named_space(A: LinearOperator, side: str) -> ParamSpace | None:
    """Named blocks of an operator's rows (side "space") or columns (side "columns"); None if it has none."""
    space = getattr(A, side, None)
    size = A.local_shape[0] if side == "space" else A.local_shape[1]
    return space if isinstance(space, ParamSpace) and space.size == size else None


def _columns(A: LinearOperator, what: str) -> ParamSpace:
    space = named_space(A, "columns")
    if space is None:
        raise ShapeError(
            f"expected a tensor or a NumPy array of {A.shape[1]} entries, got {what}, "
            f"and {A!r} has no named blocks"
        )
    return space


def _from_names(tensors: Mapping[str, Tensor], space: ParamSpace) -> Tensor:
    """Vector (n,) of tensors by the names of all parameters, or of all blocks."""
    blocks = {block.name: block.shape for block in space.blocks}
    by_parameter = tensors.keys() <= space.shapes.keys()
    expected = dict(space.shapes) if by_parameter else blocks
    unknown = [name for name in tensors if name not in space.shapes and name not in blocks]
    if unknown:
        raise UsageError(
            f"the operator has no parameter or block called {unknown[0]!r}",
            hint=near_misses(str(unknown[0]), [*space.shapes, *blocks]),
        )
    if not tensors.keys() <= expected.keys():
        raise UsageError("expected names of parameters or of blocks, got both in one dictionary")
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ShapeError(
            f"expected a tensor for each of {len(expected)} names, but {missing[0]!r} is missing",
            hint="use torch.zeros_like(parameter) for missing ones",
        )
    for name, shape in expected.items():
        _check_part(name, tensors[name], tuple(shape), space)
    tree = {name: part.to(space.dtype) for name, part in tensors.items()}
    if not by_parameter:
        return space.from_dict(tree)
    vector = space.gather(tree)
    _refuse_outside(tree, vector, space)
    return vector


def _from_list(tensors: Sequence[Tensor], space: ParamSpace) -> Tensor:
    """Vector (n,) of one tensor for each parameter, in the module's order."""
    if len(tensors) != len(space.shapes):
        names = list(space.shapes)
        raise ShapeError(
            f"expected {len(names)} tensors, for {names[0]} to {names[-1]} in the module's order, "
            f"got {len(tensors)}"
        )
    return _from_names(dict(zip(space.shapes, tensors, strict=True)), space)


def _check_part(name: str, part: Tensor, shape: tuple[int, ...], space: ParamSpace) -> None:
    got = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
    if got != shape:
        raise ShapeError(f"{name}: expected a tensor of {shape}, got {got}")
    if part.is_complex() or part.dtype == torch.bool or part.device.type != space.device.type:
        raise ShapeError(
            f"{name}: expected {space.dtype} on {space.device}, got {part.dtype} on {part.device}"
        )


def _refuse_outside(tree: Mapping[str, Tensor], vector: Tensor, space: ParamSpace) -> None:
    """Raise if a tensor is not zero at entries of its parameter that are outside the space."""
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
