"""Frobenius norms from random probes, E ‖A v‖² = ‖A‖_F², at any scale of A.

Squares leave the range of numbers long before A does: those of a float32 product of size 1e-30 are zero.
So lengths are taken of products that are scaled by a power of two, which changes no digit, and averaged
relative to the largest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.columns import mean_and_stderr
from curvescope.algorithms.estimates.intervals import positive_interval, student
from curvescope.algorithms.sums import DotSum, chunks
from curvescope.core.ranks.spread import current

SAFE = {torch.float64: 120, torch.float32: 14}  # decades around one where squares are normal numbers


class MeanSquare(NamedTuple):
    """The root of a mean of squares and the mean itself, with standard errors and 95 % intervals."""

    root: np.ndarray
    root_stderr: np.ndarray  # to first order
    low: np.ndarray  # of the root
    high: np.ndarray
    squared: np.ndarray  # zero or infinite where the range of float64 ends
    squared_stderr: np.ndarray
    samples: np.ndarray  # the squares, likewise


def column_norms(X: Tensor) -> Tensor:
    """Lengths of the columns (m, k), in float64 on their device, without a float64 copy of them: (k,)."""
    scale, squares = safe_scale(X), DotSum(X)
    for (part,) in chunks(X):
        squares.add(part if scale == 1.0 else part * scale)
    return squares.root() / scale


def safe_scale(X: Tensor) -> float:
    """A power of two that brings the largest entry near one; 1 if squares are safe as they are."""
    ends, dtype, spread = X.aminmax() if X.numel() else (), X.dtype, current()
    largest = max((abs(float(end)) for end in ends), default=0.0)
    largest = largest if spread is None else spread.largest(largest, X.device)
    if largest == 0 or not math.isfinite(largest) or abs(math.log10(largest)) <= SAFE[dtype]:
        return 1.0
    most = 1000 if dtype == torch.float64 else 120
    return 2.0 ** max(-most, min(most, -math.frexp(largest)[1]))


def mean_square(lengths: np.ndarray, cosines: np.ndarray | None = None) -> MeanSquare:
    """Mean of the squared lengths ‖A v‖² along the first axis, and its root.

    Args:
        lengths: (P, …) of P probes.
        cosines: (P − 1, …) between neighboring products A v. If given, they bound the interval from below,
            see `intervals`.
    """
    top = lengths.max(axis=0)
    unit = np.where((top > 0) & np.isfinite(top), np.exp2(np.frexp(top)[1].clip(-1000, 1000)), 1.0)
    mean, error = mean_and_stderr((lengths / unit) ** 2)
    root = np.sqrt(mean)
    bound = 0.0
    if cosines is not None and len(cosines):
        dots = cosines * (lengths[:-1] / unit) * (lengths[1:] / unit)
        bound = student(len(dots)) * np.sqrt(2 / len(lengths) * (dots**2).mean(axis=0))
    low, high = positive_interval(mean, error, len(lengths) - 1, bound=bound)
    slope = np.divide(error, 2 * root, out=np.zeros_like(root), where=(root > 0) | np.isnan(error))
    with np.errstate(over="ignore", under="ignore"):
        squared, squared_error = mean * unit**2, error * unit**2
        low, high = np.sqrt(low) * unit, np.sqrt(high) * unit
        return MeanSquare(root * unit, slope * unit, low, high, squared, squared_error, lengths**2)
