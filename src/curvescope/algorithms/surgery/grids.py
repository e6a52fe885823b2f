"""Symmetric uniform quantization grids, with one step per column or one for all.

With b bits the grid is s · {−m, …, m}, m = 2^(b−1) − 1, and the step s = max |w| / m has the largest weight
on it. Zero is on the grid, and with w also −w.

Rounding by Optimal Brain Surgeon is GPTQ (Frantar et al., 2023). Weights are rounded one after the other;
after each, the remaining free weights move to the minimum of
½ δᵀ H δ, given all fixed weights. When the current w_i goes to its grid point q_i,

    δ_F = −((w_i − q_i) / [H_F⁻¹]_ii) H_F⁻¹ e_i    over the free weights F, which include i,

which increases the loss by (w_i − q_i)² / (2 [H_F⁻¹]_ii). With H⁻¹ = Uᵀ U, U upper triangular, row i of H_F⁻¹
is U_ii U_i,F: one factorization serves all steps, and all columns of a matrix that share their H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError

Steps = Literal["column", "tensor"]
"""Choice of one step per output of a matrix, or one for the full matrix."""


@dataclass(frozen=True)
class Grid:
    """Grid that the entries of an (n, m) matrix are rounded to."""

    step: Tensor  # (m,)
    most: int  # the largest multiple of a step

    def rounded(self, W: Tensor) -> Tensor:
        """Return the nearest grid points to W (…, m); entries beyond the grid get its ends."""
        return self.step * torch.clamp(torch.round(W / self.step), -self.most, self.most)


def grid(W: Tensor, bits: int, steps: Steps = "column") -> Grid:
    """The grid of a matrix W (n, m), inputs × outputs.

    Args:
        bits: Bits per weight, at least 2.
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


class Rounded(NamedTuple):
    """Weights on a grid."""

    W: Tensor  # (n, m)
    increase: float  # Σ over columns of ½ δᵀ H δ


def compensated(W: Tensor, inverse: Tensor, grid: Grid) -> Rounded:
    """Round W (n, m) to the grid row by row; each later row compensates the errors of earlier ones.

    Args:
        W: Columns that share one H: the outputs of a linear layer, whose H = E[x xᵀ] is that of its inputs,
            or one column with all weights of a block.
        inverse: H⁻¹ (n, n).
        grid: Grid of the columns; if W is one column of a matrix's entries, the step may be (n, 1).
    """
    n = len(W)
    if W.dim() != 2 or inverse.shape != (n, n):
        raise ShapeError(f"expected weights (n, m) and an inverse (n, n), got {W.shape} and {inverse.shape}")
    U = torch.linalg.cholesky(inverse, upper=True)
    W, rounded, increase = W.clone(), torch.empty_like(W), 0.0
    for i in range(n):
        step = grid.step[i] if grid.step.dim() == 2 else grid.step
        rounded[i] = Grid(step, grid.most).rounded(W[i])
        error = (W[i] - rounded[i]) / U[i, i]
        W[i + 1 :] -= U[i, i + 1 :, None] * error
        increase += float(error.square().sum()) / 2
    return Rounded(rounded, increase)
