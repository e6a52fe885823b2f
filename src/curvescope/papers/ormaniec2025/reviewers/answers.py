"""An answer: what is claimed, what was measured, and a verdict that follows from intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from curvescope.core.result import Result
from curvescope.papers.common import decided
from curvescope.papers.ormaniec2025.reviewers.slopes import Mean, mean_of
from curvescope.runs.shown import FAILS, HOLDS, Claim

TOLERANCE = 0.1  # of an exponent
PAPER, OURS = "paper", "ours"


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


def answer(
    question: int, claim: str, expected: str, found: Mean, verdict: str,
    *, measured: str = "", source: str = OURS,
) -> Answer:  # fmt: skip
    """A row; what was measured is the interval unless it is said in words."""
    return Answer(question, claim, expected, measured or str(found), *found, verdict, source)


def is_order(found: Mean, power: float) -> bool:
    """Whether the whole interval is within TOLERANCE of the power."""
    return abs(found.low - power) <= TOLERANCE and abs(found.high - power) <= TOLERANCE


def same_orders(slopes: Mapping[str, tuple[np.ndarray, float]]) -> tuple[Mean, str, str]:
    """Whether every curve grows with its claimed power: {name: (slopes over seeds, power)}.

    Returns:
        The exponent furthest from its claim, words on what differs, and the verdict: it holds for all,
        fails for all, or holds with the exceptions that are named.
    """
    found = {name: (mean_of(values), power) for name, (values, power) in slopes.items()}
    wrong = {name: mean for name, (mean, power) in found.items() if not is_order(mean, power)}
    worst, power = max(found.values(), key=lambda pair: _distance(*pair))
    words = ", ".join(f"{name} σ^{mean.value:.2f}" for name, mean in wrong.items())
    if not wrong:
        return worst, f"{len(found)} exponents within {_distance(worst, power):.2g} of the claimed", HOLDS
    if len(wrong) == len(found):
        return worst, words, FAILS
    return worst, words, f"holds with exceptions: {len(wrong)} of {len(found)}"


def holds_where(found: Mapping[str, Mean], power: float) -> str:
    """Verdict on a law stated for all cases: it holds, fails, or holds with those that are named."""
    right = [name for name, mean in found.items() if is_order(mean, power)]
    if len(right) == len(found):
        return HOLDS
    return f"holds with {', '.join(right)}" if right else FAILS


def less_than(found: Mean, limit: float) -> str:
    """Whether a number is below a limit, with all of its interval."""
    return decided(right=found.high < limit, wrong=found.low > limit)


def more_than(found: Mean, limit: float) -> str:
    """Whether a number is above a limit, with all of its interval."""
    return decided(right=found.low > limit, wrong=found.high < limit)


def _distance(mean: Mean, power: float) -> float:
    """From the further end of the interval, NaN counting as infinitely far."""
    ends = abs(mean.low - power), abs(mean.high - power)
    return math.inf if any(map(math.isnan, ends)) else max(ends)
