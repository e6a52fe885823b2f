"""Modules that torch cannot differentiate twice."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class FusedAttention(nn.Module):
    """Fused attention, which has no second derivative on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, dim=-1))
        return nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]


class Square(torch.autograd.Function):
    """x², whose author did not think of second derivatives."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


class SquaredOnce(nn.Module):
    """The square of a linear map, differentiable once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(self.linear(x))
