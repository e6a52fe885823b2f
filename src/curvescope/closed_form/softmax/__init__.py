"""Softmax: its derivatives as deviations from the mean, and the moments of what it weighs."""

from curvescope.closed_form.softmax.deviations import (
    centered,
    masked_softmax,
    softmax_along,
    softmax_covariance,
)

__all__ = [
    "centered",
    "masked_softmax",
    "softmax_along",
    "softmax_covariance",
]
