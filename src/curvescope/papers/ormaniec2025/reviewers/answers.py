"""A question and its answers: exponents of curves, and verdicts that follow from intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from curvescope.core.result import Result
from curvescope.papers.ormaniec2025.growth_exponents import fit
from curvescope.papers.ormaniec2025.reviewers.networks import Config
from curvescope.runs.shown import FAILS, HOLDS, Claim
from curvescope.studies.common.statistics import Interval, mean_interval

BEND = 0.5  # by which local slopes of one regime differ at most
LEAST = 3  # local slopes that make a regime: a decade in the profile quick
TOLERANCE = 0.1  # of an exponent
PAPER, OURS = "paper", "ours"


class Regime(NamedTuple):
    """A range of σ on which a curve is a power of it."""

    low: float
    high: float
    slope: float


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


@dataclass(frozen=True)
class Answer(Result):
    """One row of the table."""

    question: int
    claim: str
    expected: str
    measured: str
    value: float  # the number that decides, with its 95 % interval over seeds
    low: float
    high: float
    verdict: str
    source: str

    def as_claim(self) -> Claim:
        """As papers show it."""
        whose = "ours" if self.source == OURS else "paper"
        return Claim(self.claim, self.expected, self.measured, self.verdict, self.source, whose)


@dataclass(frozen=True)
class Question:
    """What a reviewer asked: what is measured for it, by name of the piece, and what follows."""

    number: int
    text: str
    answers: Callable[[Mapping[str, Any]], list[Answer]]
    pieces: Callable[[Config], Mapping[str, Callable[[], Result]]] = lambda cfg: {}


def answer(
    question: int, claim: str, expected: str, found: Interval, verdict: str,
    *, measured: str = "", source: str = OURS,
) -> Answer:  # fmt: skip
    """A row; what was measured is the interval unless it is said in words."""
    return Answer(question, claim, expected, measured or f"{found:.2f}", *found, verdict, source)


def is_order(found: Interval, power: float) -> bool:
    """Whether the whole interval is within TOLERANCE of the power."""
    return abs(found.low - power) <= TOLERANCE and abs(found.high - power) <= TOLERANCE


def same_orders(slopes: Mapping[str, tuple[np.ndarray, float]]) -> tuple[Interval, str, str]:
    """Whether every curve grows with its claimed power: {name: (slopes over seeds, power)}.

    Returns:
        The exponent furthest from its claim, words on what differs, and the verdict: it holds for all,
        fails for all, or holds with the exceptions that are named.
    """
    found = {name: (mean_interval(values), power) for name, (values, power) in slopes.items()}
    wrong = {name: mean for name, (mean, power) in found.items() if not is_order(mean, power)}
    worst, power = max(found.values(), key=lambda pair: _distance(*pair))
    words = ", ".join(f"{name} σ^{mean.value:.2f}" for name, mean in wrong.items())
    if not wrong:
        return worst, f"{len(found)} exponents within {_distance(worst, power):.2g} of the claimed", HOLDS
    if len(wrong) == len(found):
        return worst, words, FAILS
    return worst, words, f"holds with exceptions: {len(wrong)} of {len(found)}"


def holds_where(found: Mapping[str, Interval], power: float) -> str:
    """Verdict on a law stated for all cases: it holds, fails, or holds with those that are named."""
    right = [name for name, mean in found.items() if is_order(mean, power)]
    if len(right) == len(found):
        return HOLDS
    return f"holds with {', '.join(right)}" if right else FAILS


def _distance(mean: Interval, power: float) -> float:
    """From the further end of the interval, NaN counting as infinitely far."""
    ends = abs(mean.low - power), abs(mean.high - power)
    return math.inf if any(map(math.isnan, ends)) else max(ends)
