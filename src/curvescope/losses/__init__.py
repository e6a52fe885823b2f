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
    """A loss by name, itself, or of one of torch's modules or functions."""
    if isinstance(loss, Loss):
        return loss
    found = from_torch(loss)
    if found is not None:
        return found
    if not isinstance(loss, str) or loss not in _NAMED:
        raise UsageError(f"expected a loss, got {loss!r}", hint=near_misses(str(loss), list(_NAMED)))
    return _NAMED[loss]
