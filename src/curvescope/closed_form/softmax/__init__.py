"""Softmax: its derivatives as deviations from the mean, and the moments of what it weighs."""

from curvescope.closed_form.softmax.deviations import (
    centred,
    masked_softmax,
    softmax_along,
    softmax_covariance,
)

__all__ = [
    "centred",
    "masked_softmax",
    "softmax_along",
    "softmax_covariance",
]
