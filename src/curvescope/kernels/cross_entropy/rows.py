"""A slice of logits z (C, V), row by row and in place: the loss, and the softmax's curvature.

In torch, or in Triton where that is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor


def loss_rows(
    z: Tensor, targets: Tensor, smoothing: float, *, gradient: bool, triton: bool
) -> tuple[Tensor, Tensor]:
    """lse and ℓ of each row; with `gradient` z becomes D."""
    if triton:
        from curvescope.kernels.cross_entropy import triton_kernels

        return triton_kernels.loss_rows(z, targets, smoothing, gradient)
    lse = torch.logsumexp(z, 1)
    losses = lse - (1 - smoothing) * z.gather(1, targets[:, None])[:, 0]
    if smoothing:
        losses = losses - smoothing * z.mean(1)
    if gradient:
        softmax_rows(z, lse)
        subtract_targets(z, targets, smoothing)
    return lse, losses


def curve_rows(z: Tensor, dot: Tensor, lse: Tensor | None, *, triton: bool) -> None:
    """`dot` becomes p∘(dot − p·dot); with lse, z are logits and become p, without it they are p."""
    if triton:
        from curvescope.kernels.cross_entropy import triton_kernels

        triton_kernels.curve_rows(z, dot, lse)
        return
    if lse is not None:
        softmax_rows(z, lse)
    dot.mul_(z)
    dot.addcmul_(z, dot.sum(1, keepdim=True), value=-1)


def softmax_rows(z: Tensor, lse: Tensor) -> None:
    """z becomes p = exp(z − lse)."""
    z.sub_(lse[:, None]).exp_()


def subtract_targets(p: Tensor, targets: Tensor, smoothing: float) -> None:
    """p becomes D = p − q."""
    p.scatter_add_(1, targets[:, None], p.new_full((p.shape[0], 1), smoothing - 1))
    if smoothing:
        p.sub_(smoothing / p.shape[1])
