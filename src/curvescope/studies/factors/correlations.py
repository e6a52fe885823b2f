"""Rank correlations of distance with outcome over approximations, with intervals over seeds and them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation, spearman

Statistic = Callable[[np.ndarray, np.ndarray], np.ndarray]


def over_methods(x: np.ndarray, y: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """The mean over S seeds and C checkpoints of Spearman's ρ over M approximations; both are (S, C, M).

    The interval is that of a bootstrap that draws seeds and approximations alike, since both could have been
    others and every cell depends on one of each (Owen 2007). Checkpoints of a seed are drawn together.
    """
    return _interval(x, y, draws, seed, lambda a, b: _mean(spearman(a, b)))


def gain(x: np.ndarray, other: np.ndarray, y: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """How much larger that mean is for one distance than for another, on the same draws."""

    def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _mean(spearman(a[..., 0], b) - spearman(a[..., 1], b))

    return _interval(np.stack([x, other], axis=-1), y, draws, seed, difference)


def _mean(rho: np.ndarray) -> np.ndarray:
    """Over the last two axes; nan where one of them is."""
    return rho.mean(axis=(-2, -1))


def _interval(x: np.ndarray, y: np.ndarray, draws: int, seed: int, statistic: Statistic) -> Correlation:
    """A statistic of x (S, C, M, …) and y (S, C, M), with the interval over draws."""
    source = np.random.default_rng(seed & 0xFFFFFFFF)
    S, C, M = y.shape
    seeds, methods = (source.integers(0, size, (draws, size)) for size in (S, M))
    some = (seeds[:, :, None, None], np.arange(C)[:, None], methods[:, None, None, :])
    samples = statistic(x[some], y[some])
    known = samples[np.isfinite(samples)]
    value = float(statistic(x, y))
    low, high = np.quantile(known, [0.025, 0.975]) if 2 * len(known) > len(samples) else (np.nan, np.nan)
    return Correlation(value, float(low), float(high), y.size, S)
