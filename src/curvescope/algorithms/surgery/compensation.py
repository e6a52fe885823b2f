"""Rounding as Optimal Brain Surgeon does it, which is GPTQ (Frantar et al., 2023).

Weights are rounded one after the other; each time those that are still free move to the minimum of
½ δᵀ H δ, given all that are fixed. When w_i, as moved so far, goes to its point q_i of the grid,

    δ_F = −((w_i − q_i) / [H_F⁻¹]_ii) H_F⁻¹ e_i    over the free ones F, i among them,

at the price (w_i − q_i)² / (2 [H_F⁻¹]_ii). With H⁻¹ = Uᵀ U, U upper triangular, row i of H_F⁻¹ is U_ii U_i,F:
one factorization serves all steps, and all columns of a matrix that share their H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from curvescope.algorithms.surgery.grids import Grid
from curvescope.core.errors import ShapeError


class Rounded(NamedTuple):
    """Weights on a grid."""

    W: Tensor  # (n, m)
    increase: float  # Σ over columns of ½ δᵀ H δ


def compensated(W: Tensor, inverse: Tensor, grid: Grid) -> Rounded:
    """W (n, m) on the grid, row after row, the rows below answering for what those above have lost.

    Args:
        W: Columns that share one H: the outputs of a linear layer, whose H = E[x xᵀ] is that of its inputs,
            or one column with all weights of a block.
        inverse: H⁻¹ (n, n).
        grid: Of the columns; for one column of a matrix's entries its step may be (n, 1), row by row.
    """
    n = len(W)
    if W.dim() != 2 or inverse.shape != (n, n):
        raise ShapeError(f"expected weights (n, m) and an inverse (n, n), got {W.shape} and {inverse.shape}")
    U = torch.linalg.cholesky(inverse, upper=True)
    W, found, increase = W.clone(), torch.empty_like(W), 0.0
    for i in range(n):
        step = grid.step[i] if grid.step.dim() == 2 else grid.step
        found[i] = Grid(step, grid.most).rounded(W[i])
        error = (W[i] - found[i]) / U[i, i]
        W[i + 1 :] -= U[i, i + 1 :, None] * error
        increase += float(error.square().sum()) / 2
    return Rounded(found, increase)
