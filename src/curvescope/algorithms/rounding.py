"""Which matrices are zero but for rounding.

An operator that is zero is not, in products that round: the key bias of attention, which the softmax does
not see, comes out as some matrix whose size says nothing. Rounding has no reason to be symmetric, so a matrix
that differs from its transpose by a good part of itself is rounding, and is said to be zero.
"""

from __future__ import annotations

import math

import numpy as np

UNEVEN = 0.05  # not symmetric: 0.2 to 0.6 of a matrix of rounding, less than 1e-6 of one that is there


def is_rounding(A: np.ndarray, asymmetry: float) -> bool:
    """Whether a matrix that should be symmetric is mostly rounding, by ‖A − Aᵀ‖_F / 2."""
    return asymmetry > 0 and asymmetry >= UNEVEN * length(A)


def length(A: np.ndarray) -> float:
    """‖A‖_F, where squares of the entries may be out of range."""
    return math.hypot(*A.ravel().tolist())
