"""Rank correlations (Spearman's ρ) with intervals that respect groups of dependent rows.

ρ is the correlation of ranks: 1 if y increases with x. Rows of one group (checkpoints of one block) depend on
each other, so the bootstrap draws whole groups with replacement. The bootstrap alone gives too short
intervals for few rows: if n rows are in perfect order, so is every draw. So its interval is joined with
Fisher's, atanh ρ ± 1.96 √((1 + ρ²/2) / (n − 3)) (Bonett & Wright 2000), where n is the number of groups and
|ρ| is at most 1 minus half a step of ρ, 6 / (n³ − n). Fewer than six groups have no interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvescope.algorithms.estimates.intervals import student
from curvescope.core.result import Result

ORDERED = 3  # smallest number of values for a rank correlation
FEWEST = 6  # smallest number of groups for an interval
ENDS = (0.025, 0.975)
Ends = tuple[float, float]


@dataclass(frozen=True)
class Correlation(Result):
    """Spearman's ρ and its 95 % interval; nan if there are too few rows, or no variation."""

    value: float
    low: float
    high: float
    count: int  # rows
    groups: int  # groups drawn by the bootstrap

    @property
    def words(self) -> str:
        """`+0.31 [+0.05, +0.52]`."""
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def rank_correlation(
    x: np.ndarray, y: np.ndarray, *, groups: np.ndarray | None = None, draws: int = 1000, seed: int = 0
) -> Correlation:
    """ρ of x and y (R,) each; rows with the same number in `groups` are drawn together. Groups have equal
    size.
    """
    rows = _rows(np.arange(len(x)) if groups is None else groups)
    drawn, value = _draws(rows, draws, seed), float(spearman(x, y))
    ends = _joined(_quantiles(spearman(x[drawn], y[drawn])), _fisher(value, len(rows)))
    return _correlation(value, ends, len(x), len(rows))


def mean_within(x: np.ndarray, y: np.ndarray, *, groups: np.ndarray) -> Correlation:
    """Mean over groups of ρ inside each group, so that differences between groups have no effect.

    The interval is Student's over the groups, joined with the one for two additional groups at −1 and 1. So
    agreement of all groups does not give an interval of length zero (as in Agresti & Coull 1998 for
    proportions).
    """
    rows = _rows(groups)
    correlations = np.asarray(spearman(x[rows], y[rows]))
    correlations = correlations[np.isfinite(correlations)]
    if not len(correlations):
        return Correlation(math.nan, math.nan, math.nan, len(x), 0)
    low, high = _joined(_student(correlations), _student(np.append(correlations, [-1.0, 1.0])))
    return _correlation(
        float(correlations.mean()), (max(low, -1.0), min(high, 1.0)), len(x), len(correlations)
    )


def difference(
    x: np.ndarray, other: np.ndarray, y: np.ndarray, *, draws: int = 1000, seed: int = 0
) -> Correlation:
    """ρ(x, y) − ρ(other, y), both from the same draws.

    Fisher's intervals of the two give one for the difference (Zou 2007), with the correlation between the
    draws of both.
    """
    drawn = _draws(np.arange(len(x))[:, None], draws, seed)
    first, second = spearman(x[drawn], y[drawn]), spearman(other[drawn], y[drawn])
    a, b = float(spearman(x, y)), float(spearman(other, y))
    ends = _joined(_quantiles(first - second), _zou(a, b, len(x), _draw_correlation(first, second)))
    return _correlation(a - b, ends, len(x), len(x))


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Correlation of ranks along the last axis, (…, R) to (…); equal values share their mean rank.

    nan if one side does not vary, or for fewer than three values.
    """
    from scipy.stats import rankdata

    if x.shape[-1] < ORDERED:
        return np.full(x.shape[:-1], math.nan)
    middle = (x.shape[-1] + 1) / 2
    a, b = rankdata(x, axis=-1) - middle, rankdata(y, axis=-1) - middle
    size = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return np.divide((a * b).sum(-1), size, out=np.full(x.shape[:-1], math.nan), where=size > 0)


def _rows(groups: np.ndarray) -> np.ndarray:
    """Return the rows of each group, (groups, rows per group)."""
    return np.stack([np.flatnonzero(groups == g) for g in np.unique(groups)])


def _draws(rows: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Return the rows of groups drawn with replacement, (draws, rows)."""
    source = np.random.default_rng(seed & 0xFFFFFFFF)
    return rows[source.integers(0, len(rows), (draws, len(rows)))].reshape(draws, -1)


def _quantiles(samples: np.ndarray) -> Ends:
    """Return the quantiles of the samples; nan if half of them or more cannot be ranked."""
    known = samples[np.isfinite(samples)]
    if 2 * len(known) <= len(samples):
        return math.nan, math.nan
    low, high = np.quantile(known, ENDS)
    return float(low), float(high)


def _fisher(value: float, count: int) -> Ends:
    """Return Fisher's interval of ρ over `count` rows; it contains the value, also if that is 1."""
    if count < FEWEST:
        return math.nan, math.nan
    most = 1 - 6 / (count**3 - count)
    inside = min(max(value, -most), most)
    half = 1.96 * math.sqrt((1 + inside**2 / 2) / (count - 3))
    low, high = (math.tanh(math.atanh(inside) + sign * half) for sign in (-1, 1))
    return min(low, value), max(high, value)


def _zou(a: float, b: float, count: int, correlation: float) -> Ends:
    """Return the interval of a − b from those of a and b, whose estimates have the correlation `together`."""
    (low, high), (low_b, high_b) = _fisher(a, count), _fisher(b, count)

    def length(p: float, q: float) -> float:
        return math.sqrt(max(p * p + q * q - 2 * correlation * p * q, 0.0))

    return a - b - length(a - low, high_b - b), a - b + length(high - a, b - low_b)


def _draw_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return the correlation of two rows of draws; 0 if one does not vary."""
    finite = np.isfinite(first) & np.isfinite(second)
    a, b = (row[finite] - row[finite].mean() if finite.any() else np.zeros(1) for row in (first, second))
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0 else 0.0


def _student(values: np.ndarray) -> Ends:
    """Interval of the mean of (n,) values."""
    count, mean = len(values), float(values.mean())
    half = student(count - 1) * float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return mean - half, mean + half


def _joined(first: Ends, second: Ends) -> Ends:
    """Union of two intervals; nan if one of them is nan."""
    return float(np.minimum(first[0], second[0])), float(np.maximum(first[1], second[1]))


def _correlation(value: float, ends: Ends, count: int, groups: int) -> Correlation:
    low, high = ends if groups >= FEWEST else (math.nan, math.nan)
    return Correlation(value, low, high, count, groups)
