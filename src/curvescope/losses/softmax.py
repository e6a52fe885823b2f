"""The cross-entropy of logits z, where a class may be all but certain.

There p_m = 1 − δ for the largest logit m, and loss, gradient and curvature are of the size of δ. Taken as
differences of numbers near one (log p_m, p_m − 1, ż_m − p·ż) they are right to a rounding of one, which is
the 1/δ-fold of themselves. Here, with

    S = Σ_{c≠m} exp(z_c − z_m),     d_c = z_c − z_m,     s = Σ_c Q_c,

the loss −Σ_c Q_c log p_c is s log(1 + S) − Σ_{c≠m} Q_c d_c, whose derivatives autograd takes without such a
difference. The gradient's entry of such a class is minus the sum of the others, since all sum to zero. And a
softmax does not see what all logits have in common: (diag p − p pᵀ) u = (diag p − p pᵀ)(u − u_m).
"""

from __future__ import annotations

import torch
from torch import Tensor


def hard(z: Tensor, classes: Tensor, axis: int, *, smoothing: float = 0.0) -> Tensor:
    """ℓ for one class each: q = (1 − ε) one-hot(y) + ε/C.

    Args:
        classes: Of z's shape, with one entry along the axis.
    """
    top, log_mass = _above(z, axis)
    both = z.gather(axis, torch.cat([top, classes], axis))  # one derivative, in which +1 and −1 meet first
    highest, at_target = both.split(1, axis)
    losses = log_mass + (1 - smoothing) * (highest - at_target)
    if smoothing:  # by another look-up: ε as a difference of 1 and 1 − ε would be a rounding of one
        losses = losses + smoothing * (z.gather(axis, top) - z.mean(axis, keepdim=True))
    return losses.squeeze(axis)


def soft(z: Tensor, Q: Tensor, axis: int) -> Tensor:
    """ℓ = −Σ_c Q_c log p_c for weights Q of z's shape."""
    top, log_mass = _above(z, axis)
    others = Q.scatter(axis, top, 0.0)
    losses = Q.sum(axis, keepdim=True) * log_mass
    return (losses - (others * (z - z.gather(axis, top))).sum(axis, keepdim=True)).squeeze(axis)


def slope(z: Tensor, Q: Tensor, axis: int) -> Tensor:
    """∂ℓ/∂z = s p − Q."""
    D = z.softmax(axis) * Q.sum(axis, keepdim=True) - Q
    size = D + 2 * Q  # s p + Q
    most, place = size.max(axis, keepdim=True)
    rest = D.scatter(axis, place, 0.0).sum(axis, keepdim=True)
    certain = 2 * most > size.sum(axis, keepdim=True)  # else all differences are of small numbers
    return torch.where(certain, D.scatter(axis, place, -rest), D)


def curved(z: Tensor, u: Tensor, axis: int) -> Tensor:
    """(diag p − p pᵀ) u, for directions u that may have more axes in front.

    Args:
        axis: That of the classes, counted from the last.
    """
    p = z.softmax(axis)
    u = u - u.gather(axis, _like(z.argmax(axis, keepdim=True), u))
    return p * (u - (p * u).sum(axis, keepdim=True))


def root(z: Tensor, noise: Tensor, axis: int) -> Tensor:
    """(diag √p − p √pᵀ) ε: since √pᵀ√p = 1, its covariance is diag p − p pᵀ; axes as in `curved`.

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
    """m, and log(1 + S), by which log Σ_c exp z_c is above z_m; both with one entry along the axis.

    Undefined where z_m is infinite, and so are its derivatives.
    """
    top = z.detach().argmax(axis, keepdim=True)
    highest = z.gather(axis, top)
    others = (z - highest).scatter(axis, top, -torch.inf)
    nothing = highest.detach() - highest.detach()
    return top, (others.exp().sum(axis, keepdim=True) + nothing).log1p()


def _like(index: Tensor, u: Tensor) -> Tensor:
    """An index with the axes that u has in front."""
    return index.expand(*u.shape[: u.dim() - index.dim()], *index.shape)
