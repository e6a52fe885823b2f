"""The loss along a line, beside what derivatives at θ predict, and how far the predictions hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.progress import track
from curvescope.core.result import Tabular
from curvescope.engines import EngineName
from curvescope.models.parameter_selection import Params
from curvescope.operators.curvature import Hessian
from curvescope.operators.taylor.directions import (
    Direction,
    Given,
    Point,
    as_direction,
    check_problem,
    displaced,
    dot,
    own_vector,
    towards,
)
from curvescope.operators.taylor.expansion import (
    NAMES,
    VERDICTS,
    Agreement,
    Expansion,
    Order,
    Radius,
    find_radius,
    noise,
    rounding_of,
)
from curvescope.operators.taylor.third_derivative import third_derivative
from curvescope.problem import Problem
from curvescope.viz import slices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PRECISION = 0.02  # relative width of the brackets of radii
ROUNDS = 4  # of looking for them, until none adds a point
BETWEEN = (-0.25, 1.25)  # of the way to another point


@dataclass(frozen=True)
class LossLine(Tabular):
    """Losses at θ + t d, and the predictions. The distance that t goes is |t| ‖d‖."""

    direction: str
    t: np.ndarray  # (P,) ascending: the grid, and points between which a radius was looked for
    loss: np.ndarray  # (P,) not a number, or infinite, where the model says so
    expansion: Expansion
    agreement: Agreement
    radii: dict[str, dict[str, Radius]]  # by prediction, `quadratic` or `cubic`, and side, `ahead`, `behind`
    length: float  # ‖d‖
    theta_length: float  # ‖θ‖ over the blocks that move
    num_losses: int  # at how many points the loss was evaluated, for the noise too

    @property
    def orders(self) -> list[Order]:
        """The predictions that there are."""
        return [order for order in get_args(Order) if NAMES[order] in self.radii]

    def radius(self, order: Order = 2) -> float:
        """|t| up to which a prediction holds on both sides: the smaller `Radius.value` of those looked at."""
        values = [side.value for side in self.radii[NAMES[order]].values() if side.limit > 0]
        return min(values, default=math.nan) if not any(map(math.isnan, values)) else math.nan

    def distance(self, order: Order = 2) -> float:
        """Radius as a distance |t| ‖d‖."""
        return self.radius(order) * self.length

    def verdicts(self, order: Order = 2) -> np.ndarray:
        """(P,) at every point: 1 holds, −1 fails, 0 where rounding hides it."""
        return _verdicts(self.expansion, self.agreement, order)(self.t, self.loss)

    def table(self) -> Any:
        """One row per point: what was found, predicted and allowed, and whether the predictions hold."""
        columns: dict[str, Any] = {"t": self.t, "distance": np.abs(self.t) * self.length, "loss": self.loss}
        for order in self.orders:
            name = NAMES[order]
            columns[name] = self.expansion.predicted(self.t, order)
            columns[f"{name}_error"] = self.loss - columns[name]
            columns[f"{name}_holds"] = [VERDICTS[v] for v in self.verdicts(order).tolist()]
        columns["allowed"] = self.agreement.tolerance * self.expansion.terms(self.t)
        return columns

    def plot(self, ax: Axes | None = None) -> Axes:
        """The loss with its predictions; bars below say how far each of them holds."""
        dense = np.linspace(self.t.min(), self.t.max(), 401)
        predictions = {NAMES[order]: self.expansion.predicted(dense, order) for order in self.orders}
        reach = {
            name: (-_drawn(sides["behind"]), _drawn(sides["ahead"])) for name, sides in self.radii.items()
        }
        return slices.along(ax, self.t, self.loss, dense, predictions, reach, title=self.direction)


def loss_line(
    problem: Problem,
    direction: Given | None = None,
    *blocks: Params,
    to: Point | None = None,
    span: tuple[float, float] | None = None,
    num_points: int = 41,
    tolerance: float = 0.1,
    cubic: bool = True,
    engine: EngineName = "auto",
    seed: int = 0,
) -> LossLine:
    """The loss along θ + t d with its quadratic and cubic predictions, and the radii up to which they hold.

    A prediction holds at t if its error is at most `tolerance` (|t gᵀd| + ½ t² |dᵀHd|). Its radius on a side
    is the first failure among the evaluated points: the grid, then points between the last that holds and the
    first that fails, until they are within 2 % of each other. Differences within the rounding of the loss are
    undecided; that rounding is measured (`expansion.noise`).

    Cost: one gradient, one product with the Hessian, a third derivative (a few products), and 13 +
    num_points + about 20 forward passes over the data.

    Args:
        direction: d: a vector over the blocks, tensors by the names of parameters, "gradient" for −∇L, so
            that t is a learning rate, or "random" for one of length one.
        blocks: What may move: globs and what else `Problem.space` takes; by default all that varies.
        to: In place of a direction another point, so that t = 1 is there: parameters by name, a vector, a
            model, or a problem at other parameters.
        span: Ends of the range of t. By default as far as the terms of the expansion add up to |L(θ)|, on
            both sides; (−0.25, 1.25) on the way to another point.
        tolerance: Of a prediction, relative; see above.
        cubic: Whether the third derivative is taken; a module that cannot be differentiated three times
            needs `cubic=False`.
        seed: Of the random direction.
    """
    check_problem(problem)
    check_options(tolerance, num_points, span)
    way = _direction(problem, direction, blocks, to, seed)
    space, here = problem.space(*blocks), finite_loss(problem)
    g, Hd = problem.gradient(*blocks), Hessian(problem, *blocks, engine=engine) @ way.vector
    third = third_derivative(problem, way.vector, *blocks).value if cubic else math.nan
    expansion = Expansion(here, dot(g, way.vector), dot(way.vector, Hd), third)
    trees = [space.scatter(way.vector)]
    losses = Losses(lambda t: displaced(problem, trees, [t]).loss_value())
    eps = rounding_of(problem.dtype)
    reach = expansion.reach(abs(here) or 1.0)
    rounding = noise(losses, expansion.reach(math.sqrt(eps) * abs(here)), here, eps) if here else 0.0
    agreement = Agreement(float(tolerance), rounding)
    low, high = span or (BETWEEN if to is not None else (-reach, reach))
    grid = _grid(low, high, num_points, *([1.0] if to is not None else []))
    values = {0.0: here} | {t: losses(t) for t in track(grid, "line")}
    radii = _radii(values, losses, expansion, agreement, (2, 3) if cubic else (2,))
    t = np.array(sorted(values))
    theta = own_vector(problem, *blocks)
    return LossLine(
        direction=way.name,
        t=t,
        loss=np.array([values[x] for x in t.tolist()]),
        expansion=expansion,
        agreement=agreement,
        radii=radii,
        length=math.sqrt(dot(way.vector, way.vector)),
        theta_length=math.sqrt(dot(theta, theta)),
        num_losses=losses.count + 1,
    )


class Losses:
    """The loss as a function, counted."""

    def __init__(self, evaluate: Callable[[float], float]):
        self._evaluate, self.count = evaluate, 0

    def __call__(self, t: float) -> float:
        """L at t, whatever kind of number it is."""
        self.count += 1
        return self._evaluate(t)


def check_options(tolerance: Any, num_points: Any, span: Any) -> None:
    """Raise unless they can be used."""
    if not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf:
        raise UsageError(f"expected a tolerance above 0, got {tolerance!r}")
    if isinstance(num_points, bool) or not isinstance(num_points, int) or num_points < 2:
        raise UsageError(f"expected num_points of at least 2, got {num_points!r}")
    if span is None:
        return
    try:
        low, high = map(float, span)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UsageError(f"expected a span (low, high) of t, low below high, got {span!r}")


def finite_loss(problem: Problem) -> float:
    """L(θ), refused where it is no number: there is nothing to expand."""
    value = problem.loss_value()
    if not math.isfinite(value):
        raise CurvescopeError(
            f"the loss at θ is {value}, so it has no expansion there",
            hint="look for diverged weights, or use dtype='float64'",
        )
    return value


def _direction(problem: Problem, direction: Any, blocks: tuple[Params, ...], to: Any, seed: int) -> Direction:
    if (direction is None) == (to is None):
        raise UsageError(
            "expected either a direction or a point `to`, got " + ("neither" if to is None else "both")
        )
    return (
        as_direction(problem, direction, *blocks, seed=seed) if to is None else towards(problem, to, *blocks)
    )


def _grid(low: float, high: float, num_points: int, *others: float) -> list[float]:
    """Equally spaced points and others that lie between them, without zero."""
    points = {*np.linspace(low, high, num_points).tolist(), *(t for t in others if low <= t <= high)}
    return sorted(t for t in points if abs(t) > 1e-12 * (high - low))


def _radii(
    values: dict[float, float],
    losses: Losses,
    expansion: Expansion,
    agreement: Agreement,
    orders: tuple[Order, ...],
) -> dict[str, dict[str, Radius]]:
    """Return the radii of every prediction on both sides, from the points of all predictions."""
    radii: dict[str, dict[str, Radius]] = {}
    for _ in range(ROUNDS):
        known = len(values)
        for order in orders:
            verdicts = _verdicts(expansion, agreement, order)
            radii[NAMES[order]] = {
                name: find_radius(values, verdicts, losses, side, precision=PRECISION)
                for name, side in (("ahead", 1), ("behind", -1))
            }
        if len(values) == known:
            break
    return radii


def _verdicts(
    expansion: Expansion, agreement: Agreement, order: Order
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The verdicts on a prediction as a function of t and the loss there."""

    def verdicts(t: np.ndarray, loss: np.ndarray) -> np.ndarray:
        difference = loss - expansion.predicted(t, order)
        return agreement.verdicts(difference, expansion.terms(t), loss, expansion.loss)

    return verdicts


def _drawn(side: Radius) -> float:
    return 0.0 if math.isnan(side.value) else side.value
