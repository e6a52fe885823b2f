"""A gradient that is added up one leaf after the other: it is never in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor


def add_gradient(value: Tensor, leaves: Mapping[str, Tensor], add: Callable[[str, Tensor], object]) -> None:
    """Hand ∂value/∂leaf over, `add(name, derivative)`, for those leaves that the value depends on."""

    def take(name: str, derivative: Tensor) -> Tensor:
        add(name, derivative)
        return derivative.new_zeros(()).expand(derivative.shape)

    hooks = [leaf.register_hook(partial(take, name)) for name, leaf in leaves.items()]
    try:
        torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
