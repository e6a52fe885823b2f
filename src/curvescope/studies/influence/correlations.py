"""Rank correlations of predicted with measured changes, over queries and removed sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation, spearman

Statistic = Callable[[np.ndarray, np.ndarray], np.ndarray]


def draws_of(shape: tuple[int, int], draws: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries (draws, Q) and removed sequences (draws, R), drawn with replacement, apart from each other."""
    source = np.random.default_rng(seed & 0xFFFFFFFF)
    queries, removed = (source.integers(0, size, (draws, size)) for size in shape)
    return queries, removed


def over_queries(predicted: np.ndarray, measured: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """The mean over queries of Spearman's ρ over removed sequences; both are (Q, R).

    The interval is that of a bootstrap that draws queries and removed sequences alike, since both could have
    been others and every cell depends on one of each (Owen 2007).
    """
    return _interval(predicted, measured, draws, seed, lambda p, m: spearman(p, m).mean(-1))


def gain(one: np.ndarray, other: np.ndarray, measured: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """How much larger that mean is for one prediction than for another, on the same draws."""
    both = np.stack([one, other], axis=-1)

    def difference(p: np.ndarray, m: np.ndarray) -> np.ndarray:
        return (spearman(p[..., 0], m) - spearman(p[..., 1], m)).mean(-1)

    return _interval(both, measured, draws, seed, difference)


def slope(predicted: np.ndarray, measured: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """The median over all cells of measured by predicted change; 1 where the size is right, too.

    A median, because a retraining that ends elsewhere would decide a least-squares slope alone. Cells without
    any change, 0 by 0, are left out: `count` is that of the others.
    """

    def ratio(p: np.ndarray, m: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return _known_median((m / p).reshape(*m.shape[:-2], -1))

    left = int(((predicted != 0) | (measured != 0)).sum())
    return replace(_interval(predicted, measured, draws, seed, ratio), count=left)


def _known_median(values: np.ndarray) -> np.ndarray:
    """Along the last axis, of those that are not nan; nan where all are."""
    ordered, count = np.sort(values, axis=-1), (~np.isnan(values)).sum(-1, keepdims=True)  # nan come last
    middle = [np.take_along_axis(ordered, place, -1)[..., 0] for place in ((count - 1) // 2, count // 2)]
    return (middle[0] + middle[1]) / 2


def _interval(
    predicted: np.ndarray, measured: np.ndarray, draws: int, seed: int, statistic: Statistic
) -> Correlation:
    """A statistic of predicted (Q, R, …) and measured (Q, R) changes, with the interval over draws."""
    rows, columns = draws_of(measured.shape, draws, seed)
    some = (rows[:, :, None], columns[:, None, :])
    samples = statistic(predicted[some], measured[some])
    known = samples[np.isfinite(samples)]
    value = float(statistic(predicted, measured))
    low, high = np.quantile(known, [0.025, 0.975]) if 2 * len(known) > len(samples) else (np.nan, np.nan)
    return Correlation(value, float(low), float(high), measured.size, measured.shape[1])
