"""Grids that weights are rounded to: symmetric and uniform, with a step for each column or for all.

With b bits the grid is s · {−m, …, m}, m = 2^(b−1) − 1, and the step s = max |w| / m has the largest weight
on it. Zero is on the grid, and −w is where w is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError

Steps = Literal["column", "tensor"]
"""One step for every output of a matrix, or one for all of it."""


@dataclass(frozen=True)
class Grid:
    """What the entries of an (n, m) matrix are rounded to."""

    step: Tensor  # (m,)
    most: int  # the largest multiple of a step

    def rounded(self, W: Tensor) -> Tensor:
        """The nearest points to W (…, m); the ends of the grid for what lies beyond."""
        return self.step * torch.clamp(torch.round(W / self.step), -self.most, self.most)


def grid(W: Tensor, bits: int, steps: Steps = "column") -> Grid:
    """The grid of a matrix W (n, m), inputs × outputs.

    Args:
        bits: From 2 on.
        steps: `column`, a step for every output, or `tensor`, one for all.
    """
    if W.dim() != 2:
        raise ShapeError(f"expected a matrix, inputs × outputs, got a tensor of shape {tuple(W.shape)}")
    if not isinstance(bits, int) or bits < 2:
        raise UsageError(f"expected at least 2 bits, got {bits!r}")
    if steps not in get_args(Steps):
        raise UsageError(f"expected steps to be one of {', '.join(get_args(Steps))}, got {steps!r}")
    most = 2 ** (bits - 1) - 1
    largest = W.abs().amax(0) if steps == "column" else W.abs().max().expand(W.shape[1])
    step = torch.where(largest > 0, largest / most, torch.ones_like(largest))
    return Grid(step, most)
