"""Training of many runs at once as one stack of parameters, and the grid of learning rates for searches.

`adam` and `sgd` act on each entry, so one call updates all runs of a stack independently.
`curvescope.train.train` trains a single model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Optimizer = Literal["adam", "sgd"]
BETAS, EPS = (0.9, 0.999), 1e-8  # defaults of Adam
Move = Callable[[Tensor, Tensor], Tensor]
"""Function of parameters and gradients that returns the updated parameters."""


def adam(theta: Tensor, lr: Tensor) -> Move:
    """Return the update θ − η m̂ / (√v̂ + ε) of torch.optim.Adam; lr broadcasts to θ."""
    m, v, count = torch.zeros_like(theta), torch.zeros_like(theta), 0
    first, second = BETAS

    def move(theta: Tensor, g: Tensor) -> Tensor:
        nonlocal count
        count += 1
        m.lerp_(g, 1 - first)
        v.mul_(second).addcmul_(g, g, value=1 - second)
        root = v.sqrt().div_(math.sqrt(1 - second**count)).add_(EPS)
        return theta - lr / (1 - first**count) * m / root

    return move


def sgd(theta: Tensor, lr: Tensor, *, momentum: float = 0.0) -> Move:
    """Return the update θ − η b with b ← μ b + g of torch.optim.SGD; lr broadcasts to θ."""
    b = torch.zeros_like(theta)

    def move(theta: Tensor, g: Tensor) -> Tensor:
        return theta - lr * b.mul_(momentum).add_(g)

    return move


def rate_of(rung: int) -> float:
    """Learning rate of a rung of the ladder: … −2: 0.1, −1: 0.3, 0: 1, 1: 3, …"""
    power, half = divmod(rung, 2)
    return float(f"{3 if half else 1}e{power}")


def rung_of(rate: float) -> int:
    """Index of the learning rate that is nearest."""
    return round(2 * math.log10(rate))
