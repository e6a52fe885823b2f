"""A small network whose queries, keys and values are rows of one matrix, and its Hessian."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

import curvescope as cs
from oracles import drawn, shaken


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal float64 numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Net(nn.Module):
    """A layer whose queries, keys and values are rows of one matrix, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


@cache
def hessian() -> cs.Hessian:
    """The Hessian of the squared error over all of its blocks."""
    module = shaken(drawn(Net))
    return cs.Hessian(cs.Problem(module, (normal(2, 3, 4, seed=1), normal(2, 3, 2, seed=2)), "mse"))
