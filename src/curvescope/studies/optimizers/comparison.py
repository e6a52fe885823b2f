"""Two optimizers at equal steps, work or time: differences of losses, paired over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from curvescope.algorithms.estimates.intervals import mean_interval
from curvescope.runs.shown import FAILS, HOLDS, OPEN
from curvescope.studies.optimizers.course import Course

if TYPE_CHECKING:
    from curvescope.studies.optimizers.study import Compared


class Gap(NamedTuple):
    """loss(one) − loss(other) as far as both go: a mean over seeds with its 95 % interval."""

    at: float  # on the axis
    mean: float
    low: float
    high: float
    seeds: int

    @property
    def verdict(self) -> str:
        """Whether the one's loss is lower."""
        return HOLDS if self.high < 0 else FAILS if self.low > 0 else OPEN

    @property
    def words(self) -> str:
        """The mean and its interval."""
        if not math.isfinite(self.mean):
            return "diverged"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def gap(one: Sequence[Course], other: Sequence[Course], axis: str) -> Gap:
    """At the farthest point of an axis that all runs of both reach."""
    at = min(course.end(axis) for course in (*one, *other))
    losses = np.array([[c.at(axis, at) for c in courses] for courses in (one, other)])
    both = np.isinf(losses).all(axis=0)  # of which neither is lower
    values = np.where(both, math.nan, losses[0] - np.where(both, 0.0, losses[1]))
    return Gap(at, *interval(values), len(values))


def judged(result: Compared, arena: str, one: str, other: str, axis: str) -> tuple[Gap, str]:
    """The difference of two, and the verdict: open where a better rate may lie beyond those tried."""
    found = gap(result.of(arena, one), result.of(arena, other), axis)
    edge = any(result.at_edge(arena, name) for name in (one, other))
    return found, OPEN if edge else found.verdict


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean and Student's interval; no number is finite where a run diverged.

    The ends are known where all values are infinite on one side: every run has diverged, and that decides.
    """
    n = len(values)
    if not np.isfinite(values).all():
        first = float(values[0])
        alike = math.isinf(first) and bool((values == first).all())
        return (first, first, first) if alike else (math.inf, math.nan, math.nan)
    mean = values.mean()
    stderr = values.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
    low, high = mean_interval(np.array(mean), np.array(stderr), n - 1)
    return float(mean), float(low), float(high)


def band(courses: Sequence[Course], axis: str, num: int = 40) -> tuple[np.ndarray, ...]:
    """An axis as far as all runs go, and mean m, low and high of the loss along it: (num,) each.

    With Student's half width h the ends are m exp(∓ h / m), the interval of log m: a loss is positive.
    """
    x = np.linspace(0, min(course.end(axis) for course in courses), num)
    losses = [[course.at(axis, float(value)) for course in courses] for value in x]
    mean, _, high = np.array([interval(np.array(row)) for row in losses]).T
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        half = (high - mean) / mean
        return x, mean, mean * np.exp(-half), mean * np.exp(half)
