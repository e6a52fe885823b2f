"""Losses: sums over terms, with gradient and Hessian in the outputs."""

from __future__ import annotations

from curvescope.core.errors import UsageError, near_misses
from curvescope.losses.base import Loss
from curvescope.losses.cross_entropy import CrossEntropy
from curvescope.losses.custom import CustomLoss
from curvescope.losses.squared_error import SquaredError

__all__ = ["CrossEntropy", "CustomLoss", "Loss", "SquaredError", "as_loss"]

_NAMED = {
    "cross_entropy": CrossEntropy(),
    "mse": SquaredError("theory"),
    "mse_mean": SquaredError("mean"),
}


def as_loss(loss: str | Loss) -> Loss:
    """A loss by name, or itself."""
    if isinstance(loss, Loss):
        return loss
    if loss not in _NAMED:
        raise UsageError(f"expected a loss, got {loss!r}", hint=near_misses(str(loss), list(_NAMED)))
    return _NAMED[loss]
