"""First and second derivative of a loss in the output F of a layer: what the closed forms ask of a loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from curvescope.closed_form.objectives import IGNORED, class_targets
from curvescope.closed_form.softmax.deviations import softmax_covariance
from curvescope.core.errors import ShapeError


class LossDerivatives(NamedTuple):
    """G = ∂ℓ/∂F, shaped like F, and B = ∂²ℓ/∂F²: a number c for c·I, or (…, L, o, o), a matrix per token."""

    G: Tensor
    B: float | Tensor


def squared_error(F: Tensor, Y: Tensor, *, factor: float | None = None) -> LossDerivatives:
    """Derivatives of ℓ = (c/2) ‖F − Y‖²: G = c (F − Y), B = c.

    `factor` is c. Unless given it is 2 / number of entries, which makes ℓ the mean squared error: for F of
    shape (L, d_V) that is 2/(L d_V), the normalization of Ormaniec et al. (2025).
    """
    if F.shape != Y.shape:
        raise ShapeError(f"expected targets shaped like F {tuple(F.shape)}, got {tuple(Y.shape)}")
    c = 2 / F.numel() if factor is None else factor
    return LossDerivatives(c * (F - Y), c)


def cross_entropy(
    F: Tensor, targets: Tensor, U: Tensor, *, b_U: Tensor | None = None, ignore_index: int = IGNORED
) -> LossDerivatives:
    """Derivatives of the mean cross-entropy of logits z = F U + b_U over the tokens that have a target.

    With p = softmax(z) and N tokens: G_z = (p − y)/N, B_z = (diag p − p pᵀ)/N, hence G = G_z Uᵀ and
    B_i = U B_z,i Uᵀ.

    Args:
        F: (…, L, o).
        targets: classes (…, L), `ignore_index` for none, or probabilities (…, L, V), as with smoothed labels.
        U: unembedding (o, V).
        b_U: (V,), if the logits have a bias.
        ignore_index: the class that stands for no target.
    """
    logits = F @ U if b_U is None else F @ U + b_U
    y, weight = class_targets(targets, logits, ignore_index=ignore_index)
    p = torch.softmax(logits, dim=-1)
    return LossDerivatives((weight * (p - y)) @ U.T, weight[..., None] * softmax_covariance(p, U))


def token_curvature(B: float | Tensor, G: Tensor) -> Tensor:
    """B as one symmetric matrix for each row of G (N, o): (N, o, o)."""
    N, o = G.shape
    if not isinstance(B, Tensor) or B.dim() == 0:
        return (B * torch.eye(o).to(G)).expand(N, o, o)
    if B.dim() < 3 or B.numel() != N * o * o or B.shape[-2:] != (o, o):
        raise ShapeError(
            f"expected B a number or one {o} × {o} matrix for each of {N} tokens, got {tuple(B.shape)}",
            hint="a loss that couples tokens has no such form; ffn_blocks and attention.blocks take one",
        )
    return B.to(G).reshape(N, o, o)
