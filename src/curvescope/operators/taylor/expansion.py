"""Taylor expansion of the loss at θ, the loss's rounding error, and the range where the expansion holds.

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
NEARBY = 6  # points on each side for measuring the noise of the loss
MANY, SHORTER = 64, 12  # noise above this many roundings is measured again, at this many shorter ranges
DEVIATIONS = 4.0  # a difference counts if it exceeds this many standard deviations of the noise


@dataclass(frozen=True)
class Expansion(Result):
    """Derivatives of t ↦ L(θ + t d) at t = 0."""

    loss: float
    slope: float  # gᵀd
    curvature: float  # dᵀHd
    third: float  # ∇³L[d,d,d]; nan if it was not requested

    def predicted(self, t: np.ndarray, order: Order) -> np.ndarray:
        """Evaluate the polynomial of degree `order` at t."""
        values = self.loss + t * self.slope + t**2 * self.curvature / 2
        return values + t**3 * self.third / 6 if order == 3 else values

    def terms(self, t: np.ndarray) -> np.ndarray:
        """|t gᵀd| + ½ t² |dᵀHd|, the scale of errors.

        Unlike the change of the loss, it is zero only at θ, unless both terms vanish.
        """
        return np.abs(t * self.slope) + t**2 * abs(self.curvature) / 2

    def reach(self, amount: float) -> float:
        """The t > 0 at which the absolute values of all known terms sum to `amount`; 1 if all are zero."""
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

    An error closer to this limit than the rounding of the loss is undecided.
    """

    tolerance: float
    rounding: float  # rounding of a difference between the loss and a prediction

    def verdicts(
        self, difference: np.ndarray, terms: np.ndarray, loss: np.ndarray, loss_at_theta: float
    ) -> np.ndarray:
        """Return HOLDS, UNDECIDED or FAILS for every point; a loss of nan fails.

        Args:
            difference: Loss minus prediction.
            terms: Scale to which the tolerance is relative.
            loss: Loss at the points; if it is larger than `loss_at_theta`, so is its rounding.
        """
        error, allowed = np.abs(difference), self.tolerance * terms
        finite = np.isfinite(error)
        size = (
            np.abs(np.where(finite, loss, loss_at_theta)) / abs(loss_at_theta)
            if loss_at_theta
            else np.ones_like(error)
        )
        rounding = self.rounding * np.maximum(size, 1.0)
        result = np.where(error + rounding <= allowed, HOLDS, UNDECIDED)
        return np.where(~finite | (error - rounding > allowed), FAILS, result).astype(int)


@dataclass(frozen=True)
class Radius(Result):
    """Distance up to which a prediction holds on one side of θ, according to the evaluated points.

    It holds at `low`, fails at `high`, and fails at no evaluated point before `high`. Nothing is known
    between the two.
    """

    low: float  # 0 if it holds at no evaluated point before it fails
    high: float  # inf if it does not fail in the range
    limit: float  # end of the range; 0 if this side was not evaluated

    @property
    def value(self) -> float:
        """Middle of the bracket; `low` if the prediction never fails, `high` if it fails at once.

        It is nan if rounding hides the answer, or if this side was not evaluated.
        """
        if self.low == 0:
            return math.nan if math.isinf(self.high) else self.high
        return self.low if math.isinf(self.high) else (self.low + self.high) / 2

    def words(self, unit: float = 1.0) -> str:
        """Describe the bracket, times a unit: `0.021 to 0.022`, `beyond 0.5`, `below 1e-05`."""
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
    max_evaluations: int = 40,
) -> Radius:
    """Bracket the first failure on one side, and bisect until high ≤ (1 + precision) low.

    If the prediction holds at no point before the first failure, the distance to θ is halved until it holds
    or rounding hides it.

    Args:
        values: Losses by t, including the grid; new evaluations are added to it.
        verdicts: Function of arrays t and losses.
        evaluate: Function that returns the loss at t.
        side: 1 or −1.
    """
    limit = max((side * t for t in values), default=0.0)
    for _ in range(max_evaluations):
        low, high = _bracket(values, verdicts, side)
        if math.isinf(high) or high <= (1 + precision) * low:
            break
        t = next((side * x for x in _inside(low, high, precision) if side * x not in values), None)
        if t is None:
            break
        values[t] = evaluate(t)
    low, high = _bracket(values, verdicts, side)
    return Radius(low, high, max(limit, 0.0))


def noise(evaluate: Callable[[float], float], reach: float, loss_at_theta: float, eps: float) -> float:
    """Rounding error of a difference of two losses, from losses at neighboring points.

    Over a short range, fourth differences Δ⁴ of the loss at thirteen equidistant points contain nothing of a
    smooth function, and 70 times the variance of its noise (Moré and Wild, Estimating computational noise,
    2011, eq. 2.3). The result is four standard deviations, and at least one rounding of L. If it is many
    roundings, the range may have been too long, and a shorter one is tried.

    Args:
        reach: Half the range of the points around θ.
        loss_at_theta: L(θ).
        eps: Machine precision of the parameters' dtype.
    """
    estimate = _fourth_differences(evaluate, reach, loss_at_theta)
    for _ in range(SHORTER):
        if estimate <= MANY * eps * abs(loss_at_theta):
            break
        reach /= 32
        nearer = _fourth_differences(evaluate, reach, loss_at_theta)
        if nearer > estimate / 4:
            break
        estimate = nearer
    return max(DEVIATIONS * estimate, eps * abs(loss_at_theta))


def _fourth_differences(evaluate: Callable[[float], float], reach: float, loss_at_theta: float) -> float:
    """Estimate the standard deviation of the noise."""
    steps = np.arange(-NEARBY, NEARBY + 1) * reach / NEARBY
    losses = np.array([loss_at_theta if t == 0 else evaluate(float(t)) for t in steps])
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
    middle, step_out = math.sqrt(low * high), 1 + precision / 4
    return [x for x in (middle, middle * step_out, middle / step_out) if low < x < high]


def _bracket(
    values: dict[float, float], verdicts: Callable[[np.ndarray, np.ndarray], np.ndarray], side: int
) -> tuple[float, float]:
    """Largest |t| at which the prediction holds before its first failure, and |t| of that failure."""
    t = np.array(sorted(x for x in values if side * x > 0))[::side]
    if not len(t):
        return 0.0, math.inf
    results = verdicts(t, np.array([values[x] for x in t.tolist()]))
    failing = np.flatnonzero(results == FAILS)
    first_failure = int(failing[0]) if len(failing) else len(t)
    holding = np.flatnonzero(results[:first_failure] == HOLDS)
    low = float(abs(t[holding[-1]])) if len(holding) else 0.0
    return low, float(abs(t[first_failure])) if len(failing) else math.inf
