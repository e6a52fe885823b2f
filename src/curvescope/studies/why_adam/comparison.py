"""Heterogeneity beside the gap, over configurations and seeds: rank correlations and paired changes.

Seeds and configurations could both have been others, and every number depends on one of each. So a
correlation's interval is that of a bootstrap that draws both (Owen 2007), and the variance of a mean over P
configurations and S seeds is

    s²_P / P + s²_S / S,    s²_P of the means over seeds, s²_S of the means over configurations,

which counts what is left of both twice and is not too small; Student's quantile has min(P, S) − 1 degrees of
freedom. Of these very configurations, `fixed`, there is the second term alone: a statement about them that
is decided sooner, and that says nothing of others.
"""

from __future__ import annotations

import math

import numpy as np

from curvescope.algorithms.estimates.intervals import CONFIDENCE, mean_interval, student
from curvescope.algorithms.estimates.ranks import FEWEST, Correlation, spearman
from curvescope.runs.shown import FAILS, HOLDS, OPEN

Interval = tuple[float, float, float]
"""Mean, low, high."""


def contrast(*groups: np.ndarray, fixed: bool = False, tests: int = 1) -> Interval:
    """The mean of (P, S) numbers, or that of a first group less that of a second, of the same seeds.

    The ends are nan where a number is not finite.

    Args:
        fixed: of these configurations and no others, so that seeds alone vary; so it is for one.
        tests: so many intervals cover together 95 times in 100 (Bonferroni).
    """
    signed = list(zip((1.0, -1.0), groups, strict=False))
    with np.errstate(invalid="ignore"):
        by_seed = np.sum([sign * group.mean(axis=0) for sign, group in signed], axis=0)
        mean = float(by_seed.mean())
    if not np.isfinite(by_seed).all():
        return mean, math.nan, math.nan
    means = [by_seed, *(group.mean(axis=1) for group in groups if len(group) > 1 and not fixed)]
    variance = sum(float(values.var(ddof=1)) / len(values) for values in means)
    degrees = min(len(values) for values in means) - 1
    wider = student(degrees, 1 - (1 - CONFIDENCE) / tests) / student(degrees)
    low, high = mean_interval(np.array(mean), np.array(wider * math.sqrt(variance)), degrees)
    return mean, float(low), float(high)


def correlation(x: np.ndarray, y: np.ndarray, *, draws: int, seed: int) -> Correlation:
    """Spearman's ρ over configurations of means over seeds: x and y are (configurations, S).

    Configurations without a number are left out.
    """
    known = ~np.isnan(x + y).any(axis=1)
    x, y = x[known], y[known]
    C, S = x.shape
    value = float(spearman(x.mean(axis=1), y.mean(axis=1)))
    if C < FEWEST:
        return Correlation(value, math.nan, math.nan, C * S, C)
    source = np.random.default_rng(seed & 0xFFFFFFFF)
    rows, columns = (source.integers(0, size, (draws, size)) for size in (C, S))
    some = (rows[:, :, None], columns[:, None, :])
    samples = spearman(x[some].mean(axis=-1), y[some].mean(axis=-1))
    sure = samples[np.isfinite(samples)]
    low, high = np.quantile(sure, [0.025, 0.975]) if 2 * len(sure) > draws else (math.nan, math.nan)
    return Correlation(value, float(low), float(high), C * S, C)


def verdict(low: float, high: float) -> str:
    """Whether an interval is above zero."""
    return HOLDS if low > 0 else FAILS if high < 0 else OPEN


def together(one: Interval, other: Interval) -> str:
    """Whether two changes go the same way, both of them decided."""
    signs = {verdict(*interval[1:]) for interval in (one, other)}
    return OPEN if OPEN in signs else HOLDS if len(signs) == 1 else FAILS


def words(interval: Interval) -> str:
    """`+0.31 [+0.05, +0.52]`."""
    mean, low, high = interval
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" if math.isfinite(mean) else "a run diverged"
