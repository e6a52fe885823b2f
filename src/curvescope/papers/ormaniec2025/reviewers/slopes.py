"""Exponents of curves: slopes per seed with an interval over seeds, and the regimes of a long curve."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from curvescope.algorithms.estimates.intervals import student
from curvescope.papers.ormaniec2025.growth.slopes import fit

BEND = 0.5  # by which local slopes of one regime differ at most
LEAST = 3  # local slopes that make a regime: a decade in the profile quick


class Mean(NamedTuple):
    """A mean over seeds with the ends of its 95 % interval; NaN where there is one seed."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Regime(NamedTuple):
    """A range of σ on which a curve is a power of it."""

    low: float
    high: float
    slope: float


def mean_of(samples: np.ndarray) -> Mean:
    """Mean and Student's interval over seeds."""
    known = np.asarray(samples, dtype=float)
    value = float(known.mean())
    if len(known) < 2:
        return Mean(value, math.nan, math.nan)
    half = student(len(known) - 1) * float(known.std(ddof=1)) / math.sqrt(len(known))
    return Mean(value, value - half, value + half)


def ratio_of(samples: np.ndarray) -> Mean:
    """Geometric mean of positive numbers and its interval."""
    return Mean(*(math.exp(x) for x in mean_of(np.log(samples))))


def exponents(sigma: np.ndarray, curves: np.ndarray, low: float = 0.0, high: float = math.inf) -> np.ndarray:
    """Slopes of log curve on log σ for low ≤ σ ≤ high, one a seed: (seeds,); NaN where a curve is zero."""
    inside = (sigma >= low * (1 - 1e-9)) & (sigma <= high * (1 + 1e-9))
    return np.array([fit(sigma[inside], curve[inside]).slope for curve in curves])


def local_slopes(sigma: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """Between neighbors: (S − 1,); NaN where one of them is zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.diff(np.log(curve)) / np.diff(np.log(sigma))
    return np.where(np.isfinite(found), found, math.nan)


def regimes(sigma: np.ndarray, curve: np.ndarray, *, bend: float = BEND) -> list[Regime]:
    """Maximal ranges, from small σ to large, whose local slopes are within `bend` of each other.

    What is shorter than LEAST slopes is a transition and left out, as is where the curve is zero.
    """
    slopes = local_slopes(sigma, curve)
    found, start = [], 0
    for end in range(1, len(slopes) + 1):
        run = slopes[start : end + 1]
        if end < len(slopes) and not np.isnan(run).any() and np.ptp(run) <= bend:
            continue
        run = slopes[start:end]
        if len(run) >= LEAST and not np.isnan(run).any():
            found.append(Regime(float(sigma[start]), float(sigma[end]), float(np.median(run))))
        start = end
    return found
