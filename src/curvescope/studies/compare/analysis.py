"""The numbers that are compared, with intervals, and the differences between two sides.

With value, low and high of a quantity on the sides a and b,

    the difference  b − a  is in  [low_b − high_a, high_b − low_a],
    the ratio       b / a  is in  [low_b / high_a, high_b / low_a],

the latter where both are above zero. For estimates with normal errors this holds at least as often as each
interval, whatever random vectors the two share, for the error of b − a is at most the sum of both errors. A
difference is decided where its interval does not hold zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from curvescope.algorithms.blocks.probes import Ends, OwnProbes
from curvescope.algorithms.estimates.intervals import student
from curvescope.studies.gap.analysis import Pair

LARGER, SMALLER, EQUAL, OPEN = "larger", "smaller", "equal", "not decided"


class Estimate(NamedTuple):
    """A number and the interval that is meant to hold it 95 times in 100; both ends are nan if unknown."""

    value: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """The wider side of the interval."""
        return max(self.value - self.low, self.high - self.value)

    def minus(self, other: Estimate) -> Estimate:
        """The difference."""
        return Estimate(self.value - other.value, self.low - other.high, self.high - other.low)

    def over(self, other: Estimate) -> Estimate:
        """The ratio; nan unless both values are above zero. An end that zero is in is 0 or infinite."""
        if not (self.value > 0 and other.value > 0):
            return Estimate(math.nan, math.nan, math.nan)
        low = max(self.low, 0.0) / other.high if other.high > 0 else math.nan
        high = self.high / other.low if other.low > 0 else math.inf
        return Estimate(self.value / other.value, low, math.nan if math.isnan(other.low) else high)

    @property
    def verdict(self) -> str:
        """Of a difference."""
        if self.value == self.low == self.high == 0:
            return EQUAL
        return LARGER if self.low > 0 else SMALLER if self.high < 0 else OPEN


def _loss(pair: Pair) -> Estimate:
    return Estimate(pair.loss, pair.loss, pair.loss)


def _ends(found: OwnProbes) -> Ends:
    assert found.ends is not None
    return found.ends


def top(found: OwnProbes) -> Estimate:
    """λ_max, which is not below what Lanczos finds."""
    ends = _ends(found)
    return Estimate(float(ends.values[1]), float(ends.values[1]), float(ends.high))


def bottom(found: OwnProbes) -> Estimate:
    """λ_min, which is not above what Lanczos finds."""
    ends = _ends(found)
    return Estimate(float(ends.values[0]), float(ends.low), float(ends.values[0]))


def trace(found: OwnProbes) -> Estimate:
    """The sum of all eigenvalues."""
    return Estimate(found.trace, found.trace_low, found.trace_high)


def norm(found: OwnProbes) -> Estimate:
    """The Frobenius norm."""
    return Estimate(found.norm, found.norm_low, found.norm_high)


def _share(pair: Pair) -> Estimate:
    value, error = pair.share()
    half = 0.0 if error == 0 else student(len(pair.hessian.squared_samples) - 1) * error
    return Estimate(value, max(value - half, 0.0), value + half)


def _gap(pair: Pair) -> Estimate:
    return Estimate(pair.gap().value, *pair.gap_interval())


QUANTITIES: Mapping[str, Callable[[Pair], Estimate]] = {
    "loss": _loss,
    "λ_max": lambda pair: top(pair.hessian),
    "λ_min": lambda pair: bottom(pair.hessian),
    "trace": lambda pair: trace(pair.hessian),
    "‖H‖_F": lambda pair: norm(pair.hessian),
    "λ_max of the GGN": lambda pair: top(pair.ggn),
    "trace of the GGN": lambda pair: trace(pair.ggn),
    "functional share": _share,
    "λ_max gap": _gap,
}
"""Of a whole model, in the order of tables and figures."""
OF_BLOCKS: Mapping[str, Callable[[OwnProbes], Estimate]] = {"λ_max": top, "trace": trace, "‖H‖_F": norm}
"""Of a diagonal block of the Hessian."""
