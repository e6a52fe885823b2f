"""Questions and answers: exponents of curves, and verdicts from intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from curvescope.core.result import Result
from curvescope.papers.ormaniec2025.growth_exponents import fit
from curvescope.papers.ormaniec2025.reviewers.networks import Config
from curvescope.runs.study_result import FAILS, HOLDS, Claim
from curvescope.studies.common.statistics import Interval, mean_interval

BEND = 0.5  # largest difference of local slopes within one regime
LEAST = 3  # fewest local slopes of a regime: a decade in the profile quick
TOLERANCE = 0.1  # tolerance of an exponent
PAPER, OURS = "paper", "ours"


class Regime(NamedTuple):
    """A range of σ in which a curve is a power of σ."""

    low: float
    high: float
    slope: float


def exponents(sigma: np.ndarray, curves: np.ndarray, low: float = 0.0, high: float = math.inf) -> np.ndarray:
    """Slopes of log curve on log σ for low ≤ σ ≤ high, one per seed: (seeds,); NaN if a curve is zero."""
    inside = (sigma >= low * (1 - 1e-9)) & (sigma <= high * (1 + 1e-9))
    return np.array([fit(sigma[inside], curve[inside]).slope for curve in curves])


def local_slopes(sigma: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """Slopes between neighboring points: (S − 1,); NaN if one of them is zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.diff(np.log(curve)) / np.diff(np.log(sigma))
    return np.where(np.isfinite(slopes), slopes, math.nan)


def regimes(sigma: np.ndarray, curve: np.ndarray, *, bend: float = BEND) -> list[Regime]:
    """Return the maximal ranges, from small to large σ, whose local slopes differ by at most `bend`.

    Ranges with fewer than LEAST slopes are transitions and are left out, like ranges in which the curve is
    zero.
    """
    slopes = local_slopes(sigma, curve)
    ranges, start = [], 0
    for end in range(1, len(slopes) + 1):
        run = slopes[start : end + 1]
        if end < len(slopes) and not np.isnan(run).any() and np.ptp(run) <= bend:
            continue
        run = slopes[start:end]
        if len(run) >= LEAST and not np.isnan(run).any():
            ranges.append(Regime(float(sigma[start]), float(sigma[end]), float(np.median(run))))
        start = end
    return ranges


@dataclass(frozen=True)
class Answer(Result):
    """One row of the table of answers."""

    question: int
    claim: str
    expected: str
    measured: str
    value: float  # the value that decides, with its 95 % interval over seeds
    low: float
    high: float
    verdict: str
    source: str

    def as_claim(self) -> Claim:
        """Convert to a claim."""
        whose = "ours" if self.source == OURS else "paper"
        return Claim(self.claim, self.expected, self.measured, self.verdict, self.source, whose)


@dataclass(frozen=True)
class Question:
    """A question of a reviewer: its measurements by name of the piece, and its answers."""

    number: int
    text: str
    answers: Callable[[Mapping[str, Any]], list[Answer]]
    pieces: Callable[[Config], Mapping[str, Callable[[], Result]]] = lambda cfg: {}


def answer(
    question: int, claim: str, expected: str, found: Interval, verdict: str,
    *, measured: str = "", source: str = OURS,
) -> Answer:  # fmt: skip
    """Return a row; the measured text is the interval unless `measured` is given."""
    return Answer(question, claim, expected, measured or f"{found:.2f}", *found, verdict, source)


def is_order(found: Interval, power: float) -> bool:
    """Return True if the whole interval is within TOLERANCE of the power."""
    return abs(found.low - power) <= TOLERANCE and abs(found.high - power) <= TOLERANCE


def same_orders(slopes: Mapping[str, tuple[np.ndarray, float]]) -> tuple[Interval, str, str]:
    """Verdict on whether every curve grows with its claimed power: {name: (slopes over seeds, power)}.

    Returns the exponent furthest from its claim, the differences in words, and the verdict: it holds for all,
    fails for all, or holds with named exceptions.
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
    """Verdict on a law that is stated for all cases: it holds, fails, or holds for the named cases."""
    right = [name for name, mean in found.items() if is_order(mean, power)]
    if len(right) == len(found):
        return HOLDS
    return f"holds with {', '.join(right)}" if right else FAILS


def _distance(mean: Interval, power: float) -> float:
    """Distance of the power from the further end of the interval; NaN counts as infinite."""
    ends = abs(mean.low - power), abs(mean.high - power)
    return math.inf if any(map(math.isnan, ends)) else max(ends)
