"""A slice of logits z (C, V), row by row and in place: the loss, and the softmax's curvature.

It uses torch, or Triton if requested. If a model is confident of a class m, p_m = 1 − δ, its loss, gradient
and curvature are of order δ. So none of them is computed as a difference of numbers near one:

    ℓ = log(1 + S) + z_m − z_y,     S = Σ_{c≠m} exp(z_c − z_m),     D_y = −Σ_{c≠y} D_c,
    p∘(ż − p·ż) = p∘(u − p·u),      u = ż − ż_m,

the last because a softmax does not depend on a constant added to all logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowStatistics(NamedTuple):
    """Statistics of the logits of each term, (T,)."""

    lse: Tensor  # log Σ_c exp z_c
    top: Tensor  # m, the largest logit's class
    slope: Tensor  # D_y


def loss_rows(
    z: Tensor, targets: Tensor, smoothing: float, *, gradient: bool, triton: bool
) -> tuple[Tensor, RowStatistics]:
    """Return ℓ and the statistics of each row; with `gradient`, overwrite z by D."""
    if triton:
        from curvescope.kernels.cross_entropy import triton_kernels

        losses, *statistics = triton_kernels.loss_rows(z, targets, smoothing, gradient)
        return losses, RowStatistics(*statistics)
    V, y = z.shape[1], targets[:, None]
    highest, top = z.max(1, keepdim=True)
    below = highest - z.gather(1, y)  # z_m − z_y
    mass = (z - highest).exp_().scatter_(1, top, 0.0).sum(1, keepdim=True)
    mass = mass + (highest - highest)  # NaN if a logit is infinite
    losses = mass.log1p() + (1 - smoothing) * below
    if smoothing:
        losses = losses + smoothing * (highest - z.mean(1, keepdim=True))
    others = torch.where(top == y, mass, 1 + mass - (-below).exp())
    slope = smoothing * (V - 1) / V - others / (1 + mass)
    statistics = RowStatistics(*(t[:, 0] for t in (highest + mass.log1p(), top, slope)))
    if gradient:
        softmax_rows(z, statistics.lse)
        subtract_targets(z, targets, statistics.slope, smoothing)
    return losses[:, 0], statistics


def curve_rows(z: Tensor, dot: Tensor, top: Tensor, lse: Tensor | None, *, triton: bool) -> None:
    """Overwrite `dot` by p∘(dot − p·dot); z contains p, or with lse logits, which are overwritten by p."""
    if triton:
        from curvescope.kernels.cross_entropy import triton_kernels

        triton_kernels.curve_rows(z, dot, top, lse)
        return
    if lse is not None:
        softmax_rows(z, lse)
    dot.sub_(dot.gather(1, top[:, None])).mul_(z)
    dot.addcmul_(z, dot.sum(1, keepdim=True), value=-1)


def softmax_rows(z: Tensor, lse: Tensor) -> None:
    """Overwrite z by p = exp(z − lse)."""
    z.sub_(lse[:, None]).exp_()


def subtract_targets(p: Tensor, targets: Tensor, slope: Tensor, smoothing: float) -> None:
    """Overwrite p by D = p − q, with the given D_y."""
    if smoothing:
        p.sub_(smoothing / p.shape[1])
    p.scatter_(1, targets[:, None], slope[:, None])
