"""Derivatives that are taken one leaf after the other: together they are a vector, which is never there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor


def take_each(
    ends: Sequence[Tensor],
    leaves: Sequence[Tensor],
    take: Callable[[int, Tensor], object],
    *,
    cotangents: Sequence[Tensor] | None = None,
    create_graph: bool = False,
) -> None:
    """Hand Σ cᵀ ∂end/∂leaf over, `take(number of the leaf, derivative)`, as soon as it is whole.

    Leaves that nothing depends on are left out. The memory of a derivative is free once `take` has let it go.
    """

    def hook(number: int, derivative: Tensor | None) -> Tensor | None:
        if derivative is None:  # some function's result for a leaf that it does not depend on
            return None
        take(number, derivative)
        return derivative.new_zeros(()).expand(derivative.shape)

    hooks = [leaf.register_hook(partial(hook, number)) for number, leaf in enumerate(leaves)]
    try:
        torch.autograd.grad(ends, leaves, cotangents, create_graph=create_graph, allow_unused=True)
    finally:
        for one in hooks:
            one.remove()
