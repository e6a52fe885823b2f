"""Losses: sums over terms, with gradient and Hessian in the outputs."""

from __future__ import annotations

from typing import Any

from curvescope.core.errors import UsageError, near_misses
from curvescope.losses.base import Loss
from curvescope.losses.cross_entropy import CrossEntropy
from curvescope.losses.custom import CustomLoss, ModelLoss
from curvescope.losses.elementwise import SquaredError
from curvescope.losses.from_torch import from_torch

__all__ = ["CrossEntropy", "CustomLoss", "Loss", "ModelLoss", "SquaredError", "as_loss"]

_NAMED = {
    "cross_entropy": CrossEntropy(),
    "mse": SquaredError("theory"),
    "mse_mean": SquaredError("mean"),
}


def as_loss(loss: Any) -> Loss:
    """Convert a name, a `Loss`, or one of torch's loss modules or functions to a `Loss`."""
    if isinstance(loss, Loss):
        return loss
    converted = from_torch(loss)
    if converted is not None:
        return converted
    if not isinstance(loss, str) or loss not in _NAMED:
        raise UsageError(f"expected a loss, got {loss!r}", hint=near_misses(str(loss), list(_NAMED)))
    return _NAMED[loss]
