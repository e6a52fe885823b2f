"""Taylor expansion of the loss at θ, its rounding error, and the range in which both agree.

L(θ + t d) = L + t gᵀd + (t²/2) dᵀHd + (t³/6) ∇³L[d,d,d] + O(t⁴)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from curvescope.core.result import Result

Order = Literal[2, 3]
NAMES: dict[Order, str] = {2: "quadratic", 3: "cubic"}
HOLDS, UNDECIDED, FAILS = 1, 0, -1
VERDICTS = {HOLDS: "holds", UNDECIDED: "below rounding", FAILS: "fails"}
NEARBY = 6  # points on each side for the noise of the loss
MANY, SHORTER = 64, 12  # roundings that are more than expected, and shorter ways that are tried then
DEVIATIONS = 4.0  # of that noise, that a difference must exceed to be one


@dataclass(frozen=True)
class Expansion(Result):
    """Derivatives of t ↦ L(θ + t d) at t = 0."""

    loss: float
    slope: float  # gᵀd
    curvature: float  # dᵀHd
    third: float  # ∇³L[d,d,d]; nan where it was not asked for

    def predicted(self, t: np.ndarray, order: Order) -> np.ndarray:
        """The polynomial of degree `order` in t."""
        values = self.loss + t * self.slope + t**2 * self.curvature / 2
        return values + t**3 * self.third / 6 if order == 3 else values

    def terms(self, t: np.ndarray) -> np.ndarray:
        """|t gᵀd| + ½ t² |dᵀHd|: what an error is compared with.

        It is zero at θ alone unless both vanish, and unlike the change of the loss it has no other zeros.
        """
        return np.abs(t * self.slope) + t**2 * abs(self.curvature) / 2

    def reach(self, amount: float) -> float:
        """The t > 0 at which the moduli of all known terms add up to `amount`; 1 where all are zero."""
        third = 0.0 if math.isnan(self.third) else abs(self.third) / 6
        sizes = [third, abs(self.curvature) / 2, abs(self.slope)]
        singly = [(amount / c) ** (1 / (3 - i)) for i, c in enumerate(sizes) if c > 0]
        if not singly or not amount > 0:
            return 1.0
        low, high = min(singly) / 3, min(singly)
        for _ in range(60):
            middle = math.sqrt(low * high)
            below = sum(c * middle ** (3 - i) for i, c in enumerate(sizes)) < amount
            low, high = (middle, high) if below else (low, middle)
        return high


@dataclass(frozen=True)
class Agreement(Result):
    """Criterion for a right prediction: its error is at most `tolerance` times the terms, see `terms`.

    An error that is nearer to that limit than the rounding of the loss decides nothing.
    """

    tolerance: float
    rounding: float  # of a difference between the loss and a prediction

    def verdicts(
        self, difference: np.ndarray, terms: np.ndarray, loss: np.ndarray, here: float
    ) -> np.ndarray:
        """HOLDS, UNDECIDED or FAILS at every point; a loss that is no number fails.

        Args:
            difference: of the loss from what is predicted.
            terms: what the tolerance is a share of.
            loss: at the points; where it is larger than `here`, at θ, so is its rounding.
        """
        error, allowed = np.abs(difference), self.tolerance * terms
        finite = np.isfinite(error)
        size = np.abs(np.where(finite, loss, here)) / abs(here) if here else np.ones_like(error)
        rounding = self.rounding * np.maximum(size, 1.0)
        result = np.where(error + rounding <= allowed, HOLDS, UNDECIDED)
        return np.where(~finite | (error - rounding > allowed), FAILS, result).astype(int)


@dataclass(frozen=True)
class Radius(Result):
    """Distance up to which a prediction holds on one side of θ, from the evaluated points.

    It holds at `low`, fails at `high`, and fails at no evaluated point before: nothing is known in between.
    """

    low: float  # 0: it holds at no evaluated point before it fails
    high: float  # inf if it does not fail in the range
    limit: float  # the end of the range; 0 if this side was not evaluated

    @property
    def value(self) -> float:
        """The middle of the bracket; for an open one, low if it never fails, high if it fails at once.

        nan if rounding hides the answer, and on a side that was not evaluated.
        """
        if self.low == 0:
            return math.nan if math.isinf(self.high) else self.high
        return self.low if math.isinf(self.high) else (self.low + self.high) / 2

    def words(self, unit: float = 1.0) -> str:
        """The bracket, times a unit: `0.021 to 0.022`, `beyond 0.5`, `below 1e-05`."""
        low, high = self.low * unit, self.high * unit
        if self.limit == 0:
            return "not evaluated"
        if math.isinf(self.high):
            return f"beyond {low:.3g}" if low > 0 else "hidden by rounding"
        return f"{low:.3g} to {high:.3g}" if low > 0 else f"below {high:.3g}"


def find_radius(
    values: dict[float, float],
    verdicts: Callable[[np.ndarray, np.ndarray], np.ndarray],
    evaluate: Callable[[float], float],
    side: int,
    *,
    precision: float,
    most: int = 40,
) -> Radius:
    """The bracket of the first failure on one side, narrowed by halving until high ≤ (1 + precision) low.

    Where the prediction holds at no point before the first that fails, steps towards θ are halved until it
    does or rounding hides it.

    Args:
        values: the loss by t, among them the grid; points that are evaluated are added to it.
        verdicts: of arrays t and losses.
        evaluate: the loss at t.
        side: 1 or −1.
    """
    limit = max((side * t for t in values), default=0.0)
    for _ in range(most):
        low, high = _bracket(values, verdicts, side)
        if math.isinf(high) or high <= (1 + precision) * low:
            break
        t = next((side * x for x in _inside(low, high, precision) if side * x not in values), None)
        if t is None:
            break
        values[t] = evaluate(t)
    low, high = _bracket(values, verdicts, side)
    return Radius(low, high, max(limit, 0.0))


def noise(evaluate: Callable[[float], float], reach: float, here: float, eps: float) -> float:
    """Rounding error of a difference of two losses, from losses at points next to each other.

    Fourth differences Δ⁴ of the loss at thirteen points, equally far from each other, hold nothing of a
    smooth function over so short a way, and 70 times the variance of its noise (Moré and Wild, Estimating
    computational noise, 2011, eq. 2.3). Four standard deviations, and at least one rounding of L. Where that
    is many roundings the way may have been too long, and a shorter one is tried.

    Args:
        reach: how far the points go, on both sides of θ.
        here: L(θ).
        eps: of the type of the parameters.
    """
    estimate = _fourth_differences(evaluate, reach, here)
    for _ in range(SHORTER):
        if estimate <= MANY * eps * abs(here):
            break
        reach /= 32
        nearer = _fourth_differences(evaluate, reach, here)
        if nearer > estimate / 4:
            break
        estimate = nearer
    return max(DEVIATIONS * estimate, eps * abs(here))


def _fourth_differences(evaluate: Callable[[float], float], reach: float, here: float) -> float:
    """The standard deviation of the noise."""
    steps = np.arange(-NEARBY, NEARBY + 1) * reach / NEARBY
    losses = np.array([here if t == 0 else evaluate(float(t)) for t in steps])
    differences = np.diff(losses, 4)
    differences = differences[np.isfinite(differences)]
    return math.sqrt(float(np.mean(differences**2)) / 70) if len(differences) else 0.0


def rounding_of(dtype: torch.dtype) -> float:
    """One unit in the last place of a number near one."""
    return float(torch.finfo(dtype).eps)


def _inside(low: float, high: float, precision: float) -> list[float]:
    """Return the next points to evaluate: the middle, and its neighbors if rounding hides the answer
    there.
    """
    if low == 0:
        return [high / 2]
    middle, beside = math.sqrt(low * high), 1 + precision / 4
    return [x for x in (middle, middle * beside, middle / beside) if low < x < high]


def _bracket(
    values: dict[float, float], verdicts: Callable[[np.ndarray, np.ndarray], np.ndarray], side: int
) -> tuple[float, float]:
    """The largest |t| at which it holds before the first failure, and that failure."""
    t = np.array(sorted(x for x in values if side * x > 0))[::side]
    if not len(t):
        return 0.0, math.inf
    results = verdicts(t, np.array([values[x] for x in t.tolist()]))
    failing = np.flatnonzero(results == FAILS)
    first = int(failing[0]) if len(failing) else len(t)
    holding = np.flatnonzero(results[:first] == HOLDS)
    low = float(abs(t[holding[-1]])) if len(holding) else 0.0
    return low, float(abs(t[first])) if len(failing) else math.inf
