"""First and second derivative of a loss in the output F of a layer: what the closed forms ask of a loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError


class LossDerivatives(NamedTuple):
    """G = ∂ℓ/∂F, shaped like F, and B = ∂²ℓ/∂F²: a number c for c·I, or (…, L, o, o), a matrix per token."""

    G: Tensor
    B: float | Tensor


def squared_error(F: Tensor, Y: Tensor, *, factor: float | None = None) -> LossDerivatives:
    """Derivatives of ℓ = (c/2) ‖F − Y‖²: G = c (F − Y), B = c.

    `factor` is c. Unless given it is 2 / number of entries, which makes ℓ the mean squared error: for F of
    shape (L, d_V) that is 2/(L d_V), the normalisation of Ormaniec et al. (2025).
    """
    if F.shape != Y.shape:
        raise ShapeError(f"expected targets shaped like F {tuple(F.shape)}, got {tuple(Y.shape)}")
    c = 2 / F.numel() if factor is None else factor
    return LossDerivatives(c * (F - Y), c)


def cross_entropy(
    F: Tensor, targets: Tensor, U: Tensor, *, b_U: Tensor | None = None, ignore_index: int = -100
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
    y, counted = _targets(targets, logits, ignore_index)
    weight = counted / counted.sum()
    p = torch.softmax(logits, dim=-1)
    G = (weight * (p - y)) @ U.T
    mean = p @ U.T  # (…, L, o), the mean of the columns of U under p
    centred = U - mean[..., :, None]
    B = (centred * (weight * p)[..., None, :]) @ centred.mT
    return LossDerivatives(G, B)


def _targets(targets: Tensor, logits: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Probabilities (…, L, V) of the targets and 1 where a token counts, (…, L, 1)."""
    if targets.shape == logits.shape and targets.is_floating_point():
        return targets, torch.ones_like(logits[..., :1])
    if targets.shape != logits.shape[:-1] or targets.is_floating_point():
        raise ShapeError(
            f"expected classes {tuple(logits.shape[:-1])} or probabilities {tuple(logits.shape)}, "
            f"got {targets.dtype} {tuple(targets.shape)}"
        )
    counted = targets != ignore_index
    if not bool(counted.any()):
        raise ShapeError("expected at least one token with a target, got none")
    classes = torch.where(counted, targets, 0)
    y = torch.nn.functional.one_hot(classes, logits.shape[-1]).to(logits)
    return y, counted[..., None].to(logits)
