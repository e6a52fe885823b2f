"""The loss along a line, its predictions from derivatives at θ, and how far the predictions hold."""

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
    DirectionInput,
    LossDirection,
    Point,
    as_direction,
    check_problem,
    displaced,
    dot,
    parameter_vector,
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
ROUNDS = 4  # largest number of searches for brackets; they stop if none adds a point
BETWEEN = (-0.25, 1.25)  # default span on the line to another point


@dataclass(frozen=True)
class LossLine(Tabular):
    """Losses at θ + t d, and the predictions. The distance from θ is |t| ‖d‖."""

    direction: str
    t: np.ndarray  # (P,) ascending: the grid, and points evaluated to find a radius
    loss: np.ndarray  # (P,) may be nan or infinite
    expansion: Expansion
    agreement: Agreement
    radii: dict[str, dict[str, Radius]]  # by prediction, `quadratic` or `cubic`, and side, `ahead`, `behind`
    length: float  # ‖d‖
    theta_length: float  # ‖θ‖ over the blocks of the direction
    num_losses: int  # number of evaluations of the loss, including those for its noise

    @property
    def orders(self) -> list[Order]:
        """Orders of the predictions."""
        return [order for order in get_args(Order) if NAMES[order] in self.radii]

    def radius(self, order: Order = 2) -> float:
        """|t| up to which a prediction holds on both sides: the smaller `Radius.value` of evaluated sides."""
        values = [side.value for side in self.radii[NAMES[order]].values() if side.limit > 0]
        return min(values, default=math.nan) if not any(map(math.isnan, values)) else math.nan

    def distance(self, order: Order = 2) -> float:
        """Radius as a distance |t| ‖d‖."""
        return self.radius(order) * self.length

    def verdicts(self, order: Order = 2) -> np.ndarray:
        """(P,) at every point: 1 holds, −1 fails, 0 hidden by rounding."""
        return _verdicts(self.expansion, self.agreement, order)(self.t, self.loss)

    def table(self) -> Any:
        """One row per point: loss, predictions, allowed errors, and whether the predictions hold."""
        columns: dict[str, Any] = {"t": self.t, "distance": np.abs(self.t) * self.length, "loss": self.loss}
        for order in self.orders:
            name = NAMES[order]
            columns[name] = self.expansion.predicted(self.t, order)
            columns[f"{name}_error"] = self.loss - columns[name]
            columns[f"{name}_holds"] = [VERDICTS[v] for v in self.verdicts(order).tolist()]
        columns["allowed"] = self.agreement.tolerance * self.expansion.terms(self.t)
        return columns

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the loss with its predictions; bars below show how far each of them holds."""
        dense = np.linspace(self.t.min(), self.t.max(), 401)
        predictions = {NAMES[order]: self.expansion.predicted(dense, order) for order in self.orders}
        reach = {
            name: (-_plotted_end(sides["behind"]), _plotted_end(sides["ahead"]))
            for name, sides in self.radii.items()
        }
        return slices.along(ax, self.t, self.loss, dense, predictions, reach, title=self.direction)


def loss_line(
    problem: Problem,
    direction: DirectionInput | None = None,
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
    undecided; the rounding is measured (`expansion.noise`).

    Cost: one gradient, one product with the Hessian, a third derivative (a few products), and 13 +
    num_points + about 20 forward passes over the data.

    Args:
        direction: d: a vector over the blocks, tensors by the names of parameters, "gradient" for −∇L, so
            that t is a learning rate, or "random" for one of length one.
        blocks: Blocks that change, as in `Problem.space`; by default all trained parameters.
        to: Another point instead of a direction, which is at t = 1: parameters by name, a vector, a model, or
            a problem at other parameters.
        span: Ends of the range of t. By default, the terms of the expansion add up to |L(θ)| at the ends;
            (−0.25, 1.25) for a line to another point.
        tolerance: Relative tolerance of a prediction, see above.
        cubic: If True, use the third derivative, too; a module that cannot be differentiated three times
            needs `cubic=False`.
        seed: Seed of the random direction.
    """
    check_problem(problem)
    check_options(tolerance, num_points, span)
    line_direction = _direction(problem, direction, blocks, to, seed)
    space, loss_at_theta = problem.space(*blocks), finite_loss(problem)
    g, Hd = problem.gradient(*blocks), Hessian(problem, *blocks, engine=engine) @ line_direction.vector
    third = third_derivative(problem, line_direction.vector, *blocks).value if cubic else math.nan
    expansion = Expansion(loss_at_theta, dot(g, line_direction.vector), dot(line_direction.vector, Hd), third)
    trees = [space.scatter(line_direction.vector)]
    losses = Losses(lambda t: displaced(problem, trees, [t]).loss_value())
    eps = rounding_of(problem.dtype)
    reach = expansion.reach(abs(loss_at_theta) or 1.0)
    rounding = (
        noise(losses, expansion.reach(math.sqrt(eps) * abs(loss_at_theta)), loss_at_theta, eps)
        if loss_at_theta
        else 0.0
    )
    agreement = Agreement(float(tolerance), rounding)
    low, high = span or (BETWEEN if to is not None else (-reach, reach))
    grid = _grid(low, high, num_points, *([1.0] if to is not None else []))
    values = {0.0: loss_at_theta} | {t: losses(t) for t in track(grid, "line")}
    radii = _radii(values, losses, expansion, agreement, (2, 3) if cubic else (2,))
    t = np.array(sorted(values))
    theta = parameter_vector(problem, *blocks)
    return LossLine(
        direction=line_direction.name,
        t=t,
        loss=np.array([values[x] for x in t.tolist()]),
        expansion=expansion,
        agreement=agreement,
        radii=radii,
        length=math.sqrt(dot(line_direction.vector, line_direction.vector)),
        theta_length=math.sqrt(dot(theta, theta)),
        num_losses=losses.count + 1,
    )


class Losses:
    """Loss as a function of t that counts its evaluations."""

    def __init__(self, evaluate: Callable[[float], float]):
        self._evaluate, self.count = evaluate, 0

    def __call__(self, t: float) -> float:
        """Return L at t, which may be nan or infinite."""
        self.count += 1
        return self._evaluate(t)


def check_options(tolerance: Any, num_points: Any, span: Any) -> None:
    """Raise unless the options are valid."""
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
    """Return L(θ); raise if it is not finite."""
    value = problem.loss_value()
    if not math.isfinite(value):
        raise CurvescopeError(
            f"the loss at θ is {value}, so it has no expansion there",
            hint="look for diverged weights, or use dtype='float64'",
        )
    return value


def _direction(
    problem: Problem, direction: Any, blocks: tuple[Params, ...], to: Any, seed: int
) -> LossDirection:
    if (direction is None) == (to is None):
        raise UsageError(
            "expected either a direction or a point `to`, got " + ("neither" if to is None else "both")
        )
    return (
        as_direction(problem, direction, *blocks, seed=seed) if to is None else towards(problem, to, *blocks)
    )


def _grid(low: float, high: float, num_points: int, *others: float) -> list[float]:
    """Return equally spaced points and the others within their range, without zero."""
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
        num_known = len(values)
        for order in orders:
            verdicts = _verdicts(expansion, agreement, order)
            radii[NAMES[order]] = {
                name: find_radius(values, verdicts, losses, side, precision=PRECISION)
                for name, side in (("ahead", 1), ("behind", -1))
            }
        if len(values) == num_known:
            break
    return radii


def _verdicts(
    expansion: Expansion, agreement: Agreement, order: Order
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function of t and losses that gives the verdicts on a prediction."""

    def verdicts(t: np.ndarray, loss: np.ndarray) -> np.ndarray:
        difference = loss - expansion.predicted(t, order)
        return agreement.verdicts(difference, expansion.terms(t), loss, expansion.loss)

    return verdicts


def _plotted_end(side: Radius) -> float:
    return 0.0 if math.isnan(side.value) else side.value
