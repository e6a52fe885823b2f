"""Cross-entropy of logits z that stays accurate for very confident models.

If p_m = 1 − δ for the largest logit m, then loss, gradient and curvature are of order δ. Computed as
differences of numbers near one (log p_m, p_m − 1, ż_m − p·ż), their relative error would be a rounding
divided by δ. So this module uses other formulas. With

    S = Σ_{c≠m} exp(z_c − z_m),     d_c = z_c − z_m,     s = Σ_c Q_c,

the loss −Σ_c Q_c log p_c is s log(1 + S) − Σ_{c≠m} Q_c d_c, whose derivatives contain no such difference. The
gradient's entry for m is minus the sum of the others, because all entries sum to zero. A softmax does not
depend on a constant added to all logits, so (diag p − p pᵀ) u = (diag p − p pᵀ)(u − u_m).
"""

from __future__ import annotations

import torch
from torch import Tensor


def hard(z: Tensor, classes: Tensor, axis: int, *, smoothing: float = 0.0) -> Tensor:
    """Return ℓ for integer classes: q = (1 − ε) one-hot(y) + ε/C.

    Args:
        classes: Classes with z's shape, except one entry along the axis.
    """
    top, log_mass = _above(z, axis)
    both = z.gather(
        axis, torch.cat([top, classes], axis)
    )  # one gather, so that +1 and −1 cancel exactly in its derivative
    highest, at_target = both.split(1, axis)
    losses = log_mass + (1 - smoothing) * (highest - at_target)
    if smoothing:  # a separate gather, because 1 − (1 − ε) would round ε
        losses = losses + smoothing * (z.gather(axis, top) - z.mean(axis, keepdim=True))
    return losses.squeeze(axis)


def soft(z: Tensor, Q: Tensor, axis: int) -> Tensor:
    """Return ℓ = −Σ_c Q_c log p_c for weights Q with z's shape."""
    top, log_mass = _above(z, axis)
    others = Q.scatter(axis, top, 0.0)
    losses = Q.sum(axis, keepdim=True) * log_mass
    return (losses - (others * (z - z.gather(axis, top))).sum(axis, keepdim=True)).squeeze(axis)


def slope(z: Tensor, Q: Tensor, axis: int) -> Tensor:
    """∂ℓ/∂z = s p − Q."""
    D = z.softmax(axis) * Q.sum(axis, keepdim=True) - Q
    size = D + 2 * Q  # s p + Q
    largest_size, position = size.max(axis, keepdim=True)
    sum_of_others = D.scatter(axis, position, 0.0).sum(axis, keepdim=True)
    certain = 2 * largest_size > size.sum(
        axis, keepdim=True
    )  # otherwise no difference is between numbers near one
    return torch.where(certain, D.scatter(axis, position, -sum_of_others), D)


def curved(z: Tensor, u: Tensor, axis: int) -> Tensor:
    """Return (diag p − p pᵀ) u, for directions u that may have more axes in front.

    Args:
        axis: Axis of the classes, counted from the last.
    """
    p = z.softmax(axis)
    u = u - u.gather(axis, _like(z.argmax(axis, keepdim=True), u))
    return p * (u - (p * u).sum(axis, keepdim=True))


def root(z: Tensor, noise: Tensor, axis: int) -> Tensor:
    """Return (diag √p − p √pᵀ) ε; its covariance is diag p − p pᵀ because √pᵀ√p = 1. Axes as in `curved`.

    For the largest class it is √p_m ε_m Σ_{c≠m} p_c − p_m Σ_{c≠m} √p_c ε_c.
    """
    p, top = z.softmax(axis), z.argmax(axis, keepdim=True)
    spread = p.sqrt() * noise
    found = spread - p * spread.sum(axis, keepdim=True)
    wide = _like(top, noise)
    left = p.scatter(axis, top, 0.0).sum(axis, keepdim=True)
    others = spread.scatter(axis, wide, 0.0).sum(axis, keepdim=True)
    at_top = spread.gather(axis, wide) * left - p.gather(axis, top) * others
    return found.scatter(axis, wide, at_top)


def _above(z: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return m, and log(1 + S) = log Σ_c exp z_c − z_m; both with one entry along the axis.

    If z_m is infinite, the value and its derivatives are nan.
    """
    top = z.detach().argmax(axis, keepdim=True)
    highest = z.gather(axis, top)
    others = (z - highest).scatter(axis, top, -torch.inf)
    nothing = highest.detach() - highest.detach()
    return top, (others.exp().sum(axis, keepdim=True) + nothing).log1p()


def _like(index: Tensor, u: Tensor) -> Tensor:
    """Expand an index by the leading axes of u."""
    return index.expand(*u.shape[: u.dim() - index.dim()], *index.shape)
