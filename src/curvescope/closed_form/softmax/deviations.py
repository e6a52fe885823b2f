"""Softmax, and deviations from the mean under its probabilities: what its derivatives are made of.

At p = softmax(z) the Jacobian diag(p) − p pᵀ maps u to p ∘ (u − Σ p u). Differences to the likeliest entry
come before the mean is taken off: small variances then keep their digits, however concentrated p is and
however large the part that all entries of u share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError


def masked_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax over the last axis where `mask` is true (everywhere without); a row of −∞ alone gives zeros."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    blind = torch.isneginf(scores).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)


def centered(p: Tensor, u: Tensor) -> Tensor:
    """u − Σ p u over the last axis, for probabilities p (…, V) and u (…, V); axes in front broadcast."""
    if p.shape[-1:] != u.shape[-1:]:
        raise ShapeError(f"expected directions over {p.shape[-1]} entries, got {tuple(u.shape)}")
    shape = torch.broadcast_shapes(p.shape, u.shape)
    top = p.argmax(-1, keepdim=True).expand(*shape[:-1], 1)
    u = u.expand(shape)
    u = u - u.gather(-1, top)
    return u - (p * u).sum(-1, keepdim=True)


def softmax_along(p: Tensor, u: Tensor) -> Tensor:
    """Dp[u] = (diag(p) − p pᵀ) u = p ∘ (u − Σ p u): (…, V). Symmetric, so Jᵀ u too."""
    return p * centered(p, u)


def softmax_covariance(p: Tensor, U: Tensor) -> Tensor:
    """U (diag(p) − p pᵀ) Uᵀ = Σ_v p_v ũ_v ũ_vᵀ for the columns of U (o, V) under p (…, V): (…, o, o)."""
    deviation = centered(p[..., None, :], U)
    return (deviation * p[..., None, :]) @ deviation.mT
