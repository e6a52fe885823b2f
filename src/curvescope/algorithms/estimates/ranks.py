"""Rank correlations with intervals: Spearman's ρ, and the bootstrap over what is independent.

ρ is the correlation of ranks: 1 where y grows with x, whatever the curve. Rows of one group (checkpoints of
one block) depend on each other, so groups are drawn with replacement, whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvescope.core.result import Result

FEWEST = 3  # values that can be in an order by more than a coin's throw


@dataclass(frozen=True)
class Correlation(Result):
    """Spearman's ρ and its 95 % interval; nan where there is nothing to be ranked."""

    value: float
    low: float
    high: float
    count: int  # rows
    groups: int  # that are drawn

    @property
    def words(self) -> str:
        """`+0.31 [+0.05, +0.52]`."""
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def rank_correlation(
    x: np.ndarray, y: np.ndarray, *, groups: np.ndarray | None = None, draws: int = 1000, seed: int = 0
) -> Correlation:
    """ρ of x and y (R,) each; rows with the same number in `groups`, of one size, are drawn together."""
    rows = _rows(np.arange(len(x)) if groups is None else groups)
    some = _draws(rows, draws, seed)
    return _correlation(spearman(x, y), spearman(x[some], y[some]), len(x), len(rows))


def mean_within(
    x: np.ndarray, y: np.ndarray, *, groups: np.ndarray, draws: int = 1000, seed: int = 0
) -> Correlation:
    """The mean over groups of ρ inside each, so that differences between groups do not count."""
    rows = _rows(groups)
    each = np.asarray(spearman(x[rows], y[rows]))
    each = each[np.isfinite(each)]
    if not len(each):
        return _correlation(math.nan, np.zeros(0), len(x), 0)
    samples = each[_draws(np.arange(len(each))[:, None], draws, seed)].mean(axis=1)
    return _correlation(each.mean(), samples, len(x), len(each))


def difference(
    x: np.ndarray, other: np.ndarray, y: np.ndarray, *, draws: int = 1000, seed: int = 0
) -> Correlation:
    """ρ(x, y) − ρ(other, y), both of the same draws."""
    some = _draws(np.arange(len(x))[:, None], draws, seed)
    samples = spearman(x[some], y[some]) - spearman(other[some], y[some])
    return _correlation(spearman(x, y) - spearman(other, y), samples, len(x), len(x))


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The correlation of ranks along the last axis, equal values sharing theirs: (…, R) to (…).

    nan where one side does not vary, or for fewer than three values.
    """
    from scipy.stats import rankdata

    if x.shape[-1] < FEWEST:
        return np.full(x.shape[:-1], math.nan)
    middle = (x.shape[-1] + 1) / 2
    a, b = rankdata(x, axis=-1) - middle, rankdata(y, axis=-1) - middle
    size = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return np.divide((a * b).sum(-1), size, out=np.full(x.shape[:-1], math.nan), where=size > 0)


def _rows(groups: np.ndarray) -> np.ndarray:
    """Rows of each group, (groups, rows of one)."""
    return np.stack([np.flatnonzero(groups == g) for g in np.unique(groups)])


def _draws(rows: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Rows of groups that were drawn with replacement, (draws, rows of all)."""
    source = np.random.default_rng(seed & 0xFFFFFFFF)
    return rows[source.integers(0, len(rows), (draws, len(rows)))].reshape(draws, -1)


def _correlation(value: np.ndarray | float, samples: np.ndarray, count: int, groups: int) -> Correlation:
    known = samples[np.isfinite(samples)]
    if groups < FEWEST or len(known) < max(len(samples) / 2, 1):
        return Correlation(float(value), math.nan, math.nan, count, groups)
    low, high = (float(end) for end in np.quantile(known, [0.025, 0.975]))
    return Correlation(float(value), low, high, count, groups)
