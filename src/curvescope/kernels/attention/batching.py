"""Several directions at once: how a function with a `vmap` rule is called on batched tensors.

`torch.autograd.grad(..., is_grads_batched=True)` runs the backward on tensors that are batched in PyTorch's
older way, which does not look for the `vmap` rule of an autograd function. `apply` does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

_add_batch_dim = getattr(torch, "_add_batch_dim")  # noqa: B009
_remove_batch_dim = getattr(torch, "_remove_batch_dim")  # noqa: B009
DEEPEST = 64  # levels of nested vmap


def apply(function: Any, *args: Any) -> tuple[Any, ...]:
    """`function.apply(*args)`, by its `vmap` rule where tensors are batched by `is_grads_batched`."""
    level, num = _level(args)
    if level is None:
        return function.apply(*args)
    dims = tuple(0 if _batched(x) else None for x in args)
    inner = [_unwrapped(x, level) if dim == 0 else x for x, dim in zip(args, dims, strict=True)]
    found, out_dims = function.vmap(SimpleNamespace(batch_size=num), dims, *inner)
    pairs = zip(found, out_dims, strict=True)
    return tuple(x if dim is None else _add_batch_dim(x, dim, level) for x, dim in pairs)


def lead(x: Tensor, dim: int | None, num: int) -> Tensor:
    """The batched axis first; one is made where there is none."""
    return x.expand(num, *x.shape) if dim is None else x.movedim(dim, 0)


def fold(x: Tensor, dim: int | None, num: int) -> Tensor:
    """`num` batches of (B, …) laid one after the other: (num·B, …)."""
    return lead(x, dim, num).flatten(0, 1)


def unfold(x: Tensor, num: int) -> Tensor:
    """(num·B, …) as (num, B, …)."""
    return x.unflatten(0, (num, -1))


def _level(args: tuple[Any, ...]) -> tuple[int | None, int]:
    """The level at which arguments are batched and how many entries there are; None where they are not."""
    first = next((x for x in args if _batched(x)), None)
    if first is None:
        return None, 0
    for level in range(1, DEEPEST + 1):
        inner = _unwrapped(first, level)
        if not is_legacy_batchedtensor(inner):
            return level, inner.shape[0]
    raise RuntimeError("batching rule not implemented: attention under nested is_grads_batched")


def _batched(x: Any) -> bool:
    return isinstance(x, Tensor) and is_legacy_batchedtensor(x)


def _unwrapped(x: Tensor, level: int) -> Tensor:
    return _remove_batch_dim(x, level, 1, 0)
