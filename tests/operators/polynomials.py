"""Problems whose loss is a function of a few parameters that one can write down."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import curvescope as cs


class Parameters(nn.Module):
    """One vector w."""

    def __init__(self, w: Tensor):
        super().__init__()
        self.w = nn.Parameter(w.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.w.sum() * x


def problem_of(function: Callable[[Tensor], Tensor], size: int = 1, dtype: torch.dtype = torch.float64):
    """L(w) = function(w) around w = 0."""
    module = Parameters(torch.zeros(size, dtype=dtype))
    batch = (torch.zeros(1, 1, dtype=dtype), torch.zeros(1, dtype=dtype))
    return cs.Problem(module, [batch], loss_fn=lambda model, batch: function(model.w))
