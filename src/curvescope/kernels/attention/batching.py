"""Batched directions: call a function with a `vmap` rule on batched tensors.

`torch.autograd.grad(..., is_grads_batched=True)` runs the backward on tensors that are batched in PyTorch's
older way, which does not look for the `vmap` rule of an autograd function. `apply` does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from curvescope.kernels.backends import is_batched, level_of, with_batch, without_batch


def apply(function: Any, *args: Any) -> tuple[Any, ...]:
    """`function.apply(*args)`, through its `vmap` rule if tensors are batched by `is_grads_batched`."""
    dims = tuple(0 if isinstance(x, Tensor) and is_batched(x) else None for x in args)
    if not any(dim == 0 for dim in dims):
        return function.apply(*args)
    level = level_of(args[dims.index(0)])
    inner = [without_batch(x, level) if dim == 0 else x for x, dim in zip(args, dims, strict=True)]
    outputs, out_dims = function.vmap(SimpleNamespace(batch_size=inner[dims.index(0)].shape[0]), dims, *inner)
    pairs = zip(outputs, out_dims, strict=True)
    return tuple(x if dim is None else with_batch(x, level, dim) for x, dim in pairs)


def lead(x: Tensor, dim: int | None, num: int) -> Tensor:
    """Move the batched axis to the front; make one if x has none."""
    return x.expand(num, *x.shape) if dim is None else x.movedim(dim, 0)


def fold(x: Tensor, dim: int | None, num: int) -> Tensor:
    """Concatenate `num` batches of (B, …): (num·B, …)."""
    return lead(x, dim, num).flatten(0, 1)


def unfold(x: Tensor, num: int) -> Tensor:
    """(num·B, …) as (num, B, …)."""
    return x.unflatten(0, (num, -1))


def fold_wide(x: Tensor | None, dim: int | None, num: int, batch: int) -> Tensor | None:
    """`num` batches of a tensor (b, …) whose b may be 1 and broadcasts: (num·B, …)."""
    if x is None:
        return None
    x = lead(x, dim, num)
    return x.expand(num, batch, *x.shape[2:]).flatten(0, 1)
