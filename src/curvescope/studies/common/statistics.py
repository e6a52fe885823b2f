"""Intervals, rank correlations, slopes and verdicts used by studies.

Every interval covers the truth 95 times in 100 (`tests/studies/test_studies_statistics.py` counts):

- `mean_interval`: Student's interval over independent samples, also for sequences of unequal length
    (`shares`);
- `geometric_interval`: Student's interval of logarithms, for ratios and sizes;
- `contrast`: interval of a mean over configurations and seeds, both random;
- `median_interval`, `median_difference`: bootstrap intervals of medians;
- `variance_interval`: interval of a variance, from the fourth moment, on a logarithmic scale;
- `crossed_bootstrap`: interval of any statistic of a table whose rows and columns are both random (Owen
    2007).

Correlations of paired samples are in `algorithms.estimates.ranks`. A verdict is one of three words: `above`
and `below` compare an interval with a number, `all_above` and `all_below` several intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from curvescope.algorithms.estimates import intervals
from curvescope.algorithms.estimates.intervals import CONFIDENCE, student
from curvescope.algorithms.estimates.ranks import Correlation, spearman
from curvescope.core.number_format import plural
from curvescope.runs.study_result import FAILS, HOLDS, OPEN, Claim, Origin

ENDS = (0.025, 0.975)
NUM_RESAMPLES = 1000
Statistic = Callable[[np.ndarray, np.ndarray], np.ndarray]
Families = Mapping[str, Sequence[Mapping[str, float]]]
"""Numbers of each run by claim, for each family of models."""
OURS: Origin = ("ours", "ours")


class Bounded(Protocol):
    """A number with an interval."""

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        ...

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        ...


class Valued(Bounded, Protocol):
    """A number with an interval that can be read."""

    @property
    def value(self) -> float:
        """The number."""
        ...


class Interval(NamedTuple):
    """A number and its 95 % interval; the ends are nan if the error is unknown."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self:.3g}"

    def __format__(self, spec: str) -> str:
        value, low, high = (format(number, spec or ".3g") for number in self)
        return f"{value} [{low}, {high}]" if np.isfinite(self.low) else value

    @property
    def words(self) -> str:
        """Text such as `+0.12 [+0.05, +0.19]`."""
        return f"{self.value:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


def interval_columns(name: str, one: Valued) -> dict[str, float]:
    """Return a number and its interval as columns of a table: `name`, `name_low` and `name_high`."""
    return {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}


# ------------------------------------------------------------------------------------------------------ means


def half_width(samples: np.ndarray) -> np.ndarray:
    """Half of Student's interval of the mean along the last axis; nan for a single sample."""
    count = samples.shape[-1]
    if count < 2:
        return np.full(samples.shape[:-1], math.nan)
    with np.errstate(invalid="ignore"):  # the result is nan if a sample is not finite
        return student(count - 1) * samples.std(axis=-1, ddof=1) / math.sqrt(count)


def mean_interval(samples: np.ndarray, shares: np.ndarray | None = None) -> Interval:
    """Mean m of (n,) samples with Student's interval; the ends are nan for a single one.

    With shares s_x = N_x n / N of sequences of N_x tokens, samples s_x d_x have the mean Σ N_x d_x / Σ N_x,
    a ratio. Its half width is t · sd(s_x (d_x − m)) / √n, which is zero if all sequences change alike,
    however long they are.
    """
    samples = np.asarray(samples, dtype=float)
    mean = float(samples.mean())
    half = float(half_width(samples if shares is None else samples - mean * shares))
    return Interval(mean, mean - half, mean + half)


def geometric_interval(samples: Sequence[float] | np.ndarray) -> Interval:
    """Geometric mean of positive samples, with Student's interval of their logarithms."""
    mean, low, high = mean_interval(np.log(np.asarray(samples, dtype=float)))
    return Interval(float(np.exp(mean)), float(np.exp(low)), float(np.exp(high)))


def contrast(*groups: np.ndarray, fixed: bool = False, tests: int = 1) -> Interval:
    """Mean of (P, S) numbers over configurations and seeds, or difference of the means of two groups.

    The ends are nan if a number is not finite.

    Args:
        fixed: Treat the configurations as fixed, so only seeds vary. A single configuration is always
            fixed.
        tests: Number of intervals with a joint coverage of 95 % (Bonferroni).
    """
    signed = list(zip((1.0, -1.0), groups, strict=False))
    with np.errstate(invalid="ignore"):
        by_seed = np.sum([sign * group.mean(axis=0) for sign, group in signed], axis=0)
        mean = float(by_seed.mean())
    if not np.isfinite(by_seed).all():
        return Interval(mean, math.nan, math.nan)
    means = [by_seed, *(group.mean(axis=1) for group in groups if len(group) > 1 and not fixed)]
    variance = sum(float(values.var(ddof=1)) / len(values) for values in means)
    degrees = min(len(values) for values in means) - 1
    wider = student(degrees, 1 - (1 - CONFIDENCE) / tests) / student(degrees)
    stderr = np.array(wider * math.sqrt(variance))
    low, high = intervals.mean_interval(np.array(mean), stderr, degrees)
    return Interval(mean, float(low), float(high))


# -------------------------------------------------------------------------------------- medians and variances


def median_interval(draws: np.ndarray, *, seed: int = 0) -> Interval:
    """Median of independent draws, with the bootstrap interval; nan if no draw is finite."""
    draws = draws[np.isfinite(draws)]
    if not len(draws):
        return Interval(math.nan, math.nan, math.nan)
    low, high = np.percentile(_medians_again(draws, np.random.default_rng(seed)), (2.5, 97.5))
    return Interval(float(np.median(draws)), float(low), float(high))


def median_difference(one: np.ndarray, other: np.ndarray, *, seed: int = 0) -> Interval:
    """Difference of the medians of two independent samples, with the bootstrap interval."""
    source = np.random.default_rng(seed)
    low, high = np.percentile(_medians_again(one, source) - _medians_again(other, source), (2.5, 97.5))
    return Interval(float(np.median(one) - np.median(other)), float(low), float(high))


def _medians_again(draws: np.ndarray, source: np.random.Generator) -> np.ndarray:
    """Medians of bootstrap resamples."""
    return np.median(source.choice(draws, (NUM_RESAMPLES, len(draws))), axis=1)


def variance_interval(samples: np.ndarray) -> Interval:
    """Variance of samples (n,), with an interval from their fourth moment, on a logarithmic scale."""
    n = len(samples)
    away = samples - samples.mean()
    variance = float((away**2).sum() / (n - 1))
    if variance == 0:
        return Interval(0.0, 0.0, 0.0)
    fourth = float((away**4).mean())
    stderr = math.sqrt(max(fourth - variance**2 * (n - 3) / (n - 1), 0.0) / n)
    step = math.exp(student(n - 1) * stderr / variance)
    return Interval(variance, variance / step, variance * step)


# --------------------------------------------------------------------------------------------- crossed tables


def crossed_bootstrap(
    statistic: Statistic,
    x: np.ndarray,
    y: np.ndarray,
    *,
    axes: tuple[int, int] = (0, 1),
    draws: int,
    seed: int,
    groups: int,
) -> Correlation:
    """Statistic of two tables, with the interval of a bootstrap along two axes.

    The bootstrap resamples rows and columns, because every cell depends on one of each (Owen 2007). The
    other axes are not resampled. The ends are nan if half of the draws have no finite statistic.

    Args:
        statistic: Maps tables like x and y, with any axes before them, to one number for each of these axes.
        x: The first table, with the axes of y and maybe more behind them.
        y: The second table.
        axes: The two axes that are resampled.
        draws: Number of resamples.
        seed: Seed of the resampling.
        groups: Number of independent groups, stored in the result.
    """
    source = np.random.default_rng(seed & 0xFFFFFFFF)
    drawn = {axis: source.integers(0, y.shape[axis], (draws, y.shape[axis])) for axis in axes}
    rows = {axis: np.arange(size)[None] for axis, size in enumerate(y.shape)} | drawn
    some = tuple(
        index.reshape(-1, *(size if i == axis else 1 for i, size in enumerate(y.shape)))
        for axis, index in rows.items()
    )
    samples = statistic(x[some], y[some])
    known = samples[np.isfinite(samples)]
    low, high = np.quantile(known, ENDS) if 2 * len(known) > len(samples) else (math.nan, math.nan)
    return Correlation(float(statistic(x, y)), float(low), float(high), y.size, groups)


def mean_correlation(
    x: np.ndarray, y: np.ndarray, *, axes: tuple[int, int] = (0, 1), draws: int, seed: int, groups: int
) -> Correlation:
    """Mean over all other axes of Spearman's ρ along the last axis of x and y."""
    others = tuple(range(1 - y.ndim, 0))

    def mean(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return spearman(a, b).mean(axis=others)

    return crossed_bootstrap(mean, x, y, axes=axes, draws=draws, seed=seed, groups=groups)


def correlation_gain(
    one: np.ndarray,
    other: np.ndarray,
    y: np.ndarray,
    *,
    axes: tuple[int, int] = (0, 1),
    draws: int,
    seed: int,
    groups: int,
) -> Correlation:
    """`mean_correlation` of `one` with y minus that of `other`, on the same draws."""
    others = tuple(range(1 - y.ndim, 0))

    def gain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (spearman(a[..., 0], b) - spearman(a[..., 1], b)).mean(axis=others)

    both = np.stack([one, other], axis=-1)
    return crossed_bootstrap(gain, both, y, axes=axes, draws=draws, seed=seed, groups=groups)


# ----------------------------------------------------------------------------------------------------- slopes


def log_slope(x: np.ndarray, y: np.ndarray) -> float:
    """Exponent p of y ∝ x^p, by least squares of log y on log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def exponent_interval(x: np.ndarray, curves: np.ndarray) -> Interval:
    """Mean exponent of curves (S, len(x)) over x, with Student's interval over the S of them."""
    return mean_interval(np.array([log_slope(x, curve) for curve in curves]))


# --------------------------------------------------------------------------------------------------- verdicts


def above(one: Bounded, than: float = 0.0) -> str:
    """Verdict on `number > than`: open if the interval contains `than`."""
    return HOLDS if one.low > than else FAILS if one.high < than else OPEN


def below(one: Bounded, than: float = 0.0) -> str:
    """Verdict on `number < than`: open if the interval contains `than`."""
    return HOLDS if one.high < than else FAILS if one.low > than else OPEN


def all_above(several: Iterable[Bounded], than: float = 0.0) -> str:
    """Verdict on `number > than` for all numbers: fails if one interval is below."""
    return _of_all([above(one, than) for one in several])


def all_below(several: Iterable[Bounded], than: float = 0.0) -> str:
    """Verdict on `number < than` for all numbers: fails if one interval is above."""
    return _of_all([below(one, than) for one in several])


def of_runs(good: Sequence[bool]) -> str:
    """Verdict over runs: holds if all are true, fails if all are false, else open."""
    return HOLDS if all(good) else FAILS if not any(good) else OPEN


def _of_all(verdicts: list[str]) -> str:
    return FAILS if FAILS in verdicts else OPEN if OPEN in verdicts else HOLDS


def _known(runs: Sequence[Mapping[str, float]], name: str) -> np.ndarray:
    values = np.array([run[name] for run in runs if name in run])
    return values[np.isfinite(values)]


def over_models(families: Families) -> list[Claim]:
    """Claim that each number is above zero: holds if the intervals of all families are, fails if one is
    below.

    An interval over the blocks of one model holds for other blocks of that model; an interval over runs
    holds for another model of the same kind. Each family has Student's interval over its runs. Numbers that
    are nan are left out.
    """
    found = []
    for name in dict.fromkeys(name for runs in families.values() for run in runs for name in run):
        known = {family: _known(runs, name) for family, runs in families.items()}
        each = {family: (mean_interval(x), len(x)) for family, x in known.items() if len(x)}
        if not each:
            continue
        measured = "; ".join(f"{f} {one.words} over {plural(n, 'run')}" for f, (one, n) in each.items())
        verdict = all_above(one for one, _ in each.values())
        found.append(Claim(name, "above 0 in every family", measured, verdict, *OURS))
    return found
