"""Gradient descent itself, on all data: beside its prediction, and to a point where there is one.

A *settled* point θ* is one where the model fits its data, found by Adam. What is left of the gradient there
would hide what the ceiling 2/λ_max says of a stationary point, so descent near θ* is on the loss without its
slope, L(θ) − ∇L(θ*)ᵀ(θ − θ*): its gradient is zero at θ*, and all higher derivatives are those of L.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms import Eigenpairs, QuadraticDescent, eigsh, quadratic_descent
from curvescope.core.errors import CurvescopeError
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.models.model import Model
from curvescope.operators import Hessian, LossLine, LossPlane, loss_line, loss_plane, per_sample
from curvescope.operators.taylor.directions import dot, own_vector
from curvescope.problem import Problem
from curvescope.runs.work import Piece

if TYPE_CHECKING:
    from curvescope.studies.taylor.study import Config

NEAR = {torch.float64: 1e-3}  # of the radius of the quadratic, where descent near a settled point begins
NEAR_ROUNDED = 0.03  # in other types, whose rounding would show nearer
WITHIN = 0.05  # of the largest change so far: a trajectory that is predicted
ADAM_EPS = 1e-8
LEAST = 30.0  # a loss that is so many times that at the start, and its gradient too, has diverged


@dataclass(frozen=True)
class Descent(Result):
    """K steps of gradient descent with one learning rate; nan behind a step that is no number."""

    share: float  # of 2/λ_max
    learning_rate: float
    change: np.ndarray  # (K + 1,) of the loss, zero at first
    gradient_norm: np.ndarray  # (K + 1,)
    along: np.ndarray  # (K + 1,) of the gradient along the top eigenvector at the start
    sharpness: float  # λ_max where it ended; nan where that was not measured

    @property
    def num_finite(self) -> int:
        """Steps, with the start, at which everything is a number."""
        return int(np.isfinite(self.change).sum())

    @property
    def diverged(self) -> bool:
        """Whether it ended at no number, or with a gradient far above all that it began with."""
        last = self.gradient_norm[self.num_finite - 1]
        return self.num_finite < len(self.change) or bool(last > LEAST * self.gradient_norm[0])

    def errors(self, predicted: np.ndarray) -> np.ndarray:
        """|predicted − found| change of the loss at every step, over the largest change so far: (K + 1,)."""
        largest = np.maximum.accumulate(np.abs(np.nan_to_num(self.change)))
        found = np.abs(predicted - self.change) / np.where(largest > 0, largest, 1.0)
        return np.where(np.isfinite(found), found, math.inf)

    def steps_within(self, predicted: np.ndarray, share: float = WITHIN) -> int:
        """The last step up to which the change of the loss is predicted within a share."""
        outside = np.flatnonzero(self.errors(predicted) > share)
        return int(outside[0]) - 1 if len(outside) else len(self.change) - 1


@dataclass(frozen=True)
class Settled(Result):
    """A point that fits the data, from θ by Adam on all of them."""

    theta: np.ndarray  # (n,) in the type of the parameters
    losses: np.ndarray  # before each step, and at the end
    goal: float  # the loss at which it stops

    @property
    def reached(self) -> bool:
        """Whether the goal was."""
        return bool(self.losses.min() <= self.goal)


def adam_direction(problem: Problem) -> Tensor:
    """−m/(√v + ε): Adam's update per learning rate, m and v the moments of the sequences' gradients at θ.

    They are what Adam's averages tend to where θ stays and every step sees one sequence, each as often as it
    weighs.
    """
    samples = per_sample(problem)
    shares = torch.as_tensor(samples.shares)
    first = second = torch.zeros(samples.space.size, dtype=torch.float64, device=problem.device)
    for which, g in samples.gradient_parts():
        weights = shares[which].to(problem.device)
        first = first + weights @ g.double()
        second = second + weights @ g.double() ** 2
    return (-first / (second.sqrt() + ADAM_EPS)).to(problem.dtype)


def ceiling(pairs: Eigenpairs) -> float:
    """2/λ_max."""
    top = float(pairs.values[0])
    if not top > 0:
        raise CurvescopeError(
            f"λ_max is {top:.3g}, so gradient descent has no ceiling here",
            hint="--set shares=[] leaves it out",
        )
    return 2 / top


def descend(
    problem: Problem,
    start: Tensor,
    pairs: Eigenpairs,
    share: float,
    num_steps: int,
    *,
    tilt: Tensor | None = None,
    measure: bool = True,
) -> Descent:
    """Gradient descent from a vector over all blocks, with a share of the ceiling as learning rate.

    Args:
        pairs: The first eigenvector is looked along.
        tilt: A gradient that is taken away everywhere.
        measure: Whether to take λ_max at the end.
    """
    rate, v = share * ceiling(pairs), _vectors(pairs)[:, 0].to(start)
    theta, last, first, rows = start.clone(), start, 0.0, []
    for k in track(range(num_steps + 1), "gradient descent"):
        here = problem.at(theta)
        value, g = here.value_and_gradient()
        if tilt is not None:
            g, value = g - tilt, value - dot(tilt, theta - start)
        first = value if k == 0 else first
        if not math.isfinite(value) or not bool(torch.isfinite(g).all()):
            break
        rows.append((value - first, math.sqrt(dot(g, g)), dot(g, v)))
        last, theta = theta, theta - rate * g
    columns = np.full((3, num_steps + 1), np.nan)
    columns[:, : len(rows)] = np.array(rows).T
    whole = measure and len(rows) == num_steps + 1
    sharpness = float(_top(problem.at(last), v).values[0]) if whole else math.nan
    return Descent(share, rate, *columns, sharpness=sharpness)


def predict(
    problem: Problem, g: Tensor, pairs: Eigenpairs, shares: tuple[float, ...], num_steps: int
) -> QuadraticDescent:
    """What the quadratic at the problem's point says of descent with these shares of the ceiling."""
    return quadratic_descent(Hessian(problem), g, [share * ceiling(pairs) for share in shares], num_steps)


def settle(problem: Problem, goal: float, num_steps: int, rate: float) -> Settled:
    """Adam on all data until the loss is at most `goal`; the best point it came by."""
    theta = own_vector(problem).clone()
    best, losses = theta.clone(), []
    adam = torch.optim.Adam([theta.requires_grad_()], lr=rate)
    for _ in track(range(num_steps + 1), "settling"):
        value, g = problem.at(theta.detach()).value_and_gradient()
        losses.append(value)
        if losses[-1] <= min(losses):
            best = theta.detach().clone()
        if not losses[-1] > goal or len(losses) > num_steps:
            break
        theta.grad = g
        adam.step()
    return Settled(best.cpu().numpy(), np.array(losses), goal)


def settled_problem(problem: Problem, settled: Settled) -> Problem:
    """The problem at θ*."""
    return problem.at(torch.as_tensor(settled.theta).to(problem.device, problem.dtype))


def away(problem: Problem, pairs: Eigenpairs) -> Tensor:
    """A direction of length one that has the top eigenvector in it and much else: v + g/‖g‖."""
    g, v = problem.gradient(), _vectors(pairs)[:, 0].to(problem.device)
    along = v * (1.0 if dot(g, v) >= 0 else -1.0)
    found = along + (g / math.sqrt(dot(g, g)) if bool((g != 0).any()) else 0)
    return found / math.sqrt(dot(found, found))


def near(problem: Problem, pairs: Eigenpairs, along: LossLine) -> tuple[Tensor, Tensor]:
    """Where descent near θ* begins, within the quadratic regime along `away`, and the gradient at θ*."""
    radius = along.radius(2)
    step = NEAR.get(problem.dtype, NEAR_ROUNDED) * (
        radius if math.isfinite(radius) else float(np.abs(along.t).max())
    )
    return own_vector(problem) + step * away(problem, pairs), problem.gradient()


def top_pairs(problem: Problem, k: int, seed: int) -> Eigenpairs:
    """The largest eigenvalues of the Hessian with their vectors v, gᵀv ≤ 0: ahead along v the loss falls.

    Without that the sign of an eigenvector is one of rounding, and ahead and behind change places.
    """
    found = eigsh(Hessian(problem), min(k, problem.space().size), which="LA", seed=seed)
    slopes = problem.gradient() @ _vectors(found)
    return replace(found, vectors=torch.where(slopes > 0, -1, 1) * _vectors(found))


def settled_line(problem: Problem, pairs: Eigenpairs, tolerance: float) -> LossLine:
    """The loss along `away`, for the radius of the quadratic."""
    return loss_line(problem, away(problem, pairs), num_points=21, tolerance=tolerance, cubic=False)


def _top(problem: Problem, v: Tensor) -> Eigenpairs:
    return eigsh(Hessian(problem), 1, which="LA", tol=1e-3, v0=v)


def _vectors(pairs: Eigenpairs) -> Tensor:
    assert pairs.vectors is not None
    return pairs.vectors


# ------------------------------------------------------------------------------------------------------- work

R = TypeVar("R", bound=Result)
SHARP, PLANE, PREDICTED = "sharp", "plane", "predicted"
SETTLED, SETTLED_SHARP = "settled", "settled.sharp"
SETTLED_LINE, SETTLED_PREDICTED = "settled.line", "settled.predicted"
NO_LINES = (SHARP, PLANE)


def descent(number: int) -> str:
    """The piece of one learning rate."""
    return f"descent.{number}"


def settled_descent(number: int) -> str:
    """The same next to a settled point."""
    return f"settled.descent.{number}"


def lines(cfg: Config, problem: Problem, other: Model | None) -> dict[str, Piece]:
    """Sharpest directions, then lines and a plane, by what the line is along."""
    options: dict[str, Any] = {
        "num_points": cfg.num_points, "tolerance": cfg.tolerance, "cubic": cfg.cubic, "engine": cfg.engine
    }  # fmt: skip

    def along(name: str, **given: Any) -> Piece:
        work = partial(loss_line, problem, **options, **given)
        return Piece(f"line.{name.replace(' ', '_')}", work, f"along {name}", _told(name), "lines")

    def top(i: int) -> Piece:
        def work(pairs: Result) -> LossLine:
            return loss_line(problem, _column(problem, pairs, i), **options)

        name = f"eigenvector {i + 1}"
        return Piece(f"line.top_{i}", work, f"along {name}", _told(name), "lines", needs=(SHARP,))

    def update() -> LossLine:
        return loss_line(problem, adam_direction(problem), **options)

    found = {SHARP: Piece(SHARP, partial(top_pairs, problem, cfg.num_top, cfg.seed), "sharpest directions")}
    found["gradient"] = along("gradient", direction="gradient")
    if cfg.update:
        found["Adam's update"] = Piece(
            "line.update", update, "along an update", _told("Adam's update"), "lines"
        )
    found |= {f"eigenvector {i + 1}": top(i) for i in range(min(cfg.num_top, problem.space().size))}
    for i in range(cfg.num_random):
        name = "random" if cfg.num_random == 1 else f"random {i + 1}"
        found[name] = along(name, direction="random", seed=cfg.seed + i)
    if other is not None:
        found["checkpoint"] = along("checkpoint", to=other)
    if cfg.plane_points:
        found[PLANE] = Piece(PLANE, partial(_plane, cfg, problem), "plane", needs=(SHARP,))
    return found


def descents(cfg: Config, problem: Problem) -> list[Piece]:
    """The prediction at the model, and a descent for each learning rate."""
    if not cfg.shares:
        return []

    def predicted(pairs: Result) -> QuadraticDescent:
        return predict(problem, problem.gradient(), _as(Eigenpairs, pairs), cfg.shares, cfg.num_steps)

    def taken(share: float, pairs: Result) -> Descent:
        return descend(problem, own_vector(problem), _as(Eigenpairs, pairs), share, cfg.num_steps)

    found = [Piece(PREDICTED, predicted, "descent, predicted", needs=(SHARP,))]
    for i, share in enumerate(cfg.shares):
        words = f"descent at {share:g} of the ceiling"
        found.append(Piece(descent(i), partial(taken, share), words, kind="descents", needs=(SHARP,)))
    return found


def settled(cfg: Config, problem: Problem) -> list[Piece]:
    """A point that fits the data, and the same next to it."""
    if not cfg.shares or not cfg.settle:
        return []
    needs = (SETTLED, SETTLED_SHARP, SETTLED_LINE)

    def fitted() -> Settled:
        return settle(problem, cfg.settle * problem.loss_value(), cfg.fit_steps, cfg.fit_rate)

    def sharp(point: Result) -> Eigenpairs:
        return top_pairs(settled_problem(problem, _as(Settled, point)), 1, cfg.seed)

    def along(point: Result, pairs: Result) -> LossLine:
        here = settled_problem(problem, _as(Settled, point))
        return settled_line(here, _as(Eigenpairs, pairs), cfg.tolerance)

    def predicted(point: Result, pairs: Result, way: Result) -> QuadraticDescent:
        here = settled_problem(problem, _as(Settled, point))
        start, tilt = near(here, _as(Eigenpairs, pairs), _as(LossLine, way))
        g = here.at(start).gradient() - tilt
        return predict(here, g, _as(Eigenpairs, pairs), cfg.shares, cfg.num_steps)

    def taken(share: float, point: Result, pairs: Result, way: Result) -> Descent:
        here = settled_problem(problem, _as(Settled, point))
        start, tilt = near(here, _as(Eigenpairs, pairs), _as(LossLine, way))
        top = _as(Eigenpairs, pairs)
        return descend(here, start, top, share, cfg.num_steps, tilt=tilt, measure=False)

    found = [
        Piece(SETTLED, fitted, "settling"),
        Piece(SETTLED_SHARP, sharp, "λ_max where it settled", needs=(SETTLED,)),
        Piece(SETTLED_LINE, along, "line where it settled", needs=(SETTLED, SETTLED_SHARP)),
        Piece(SETTLED_PREDICTED, predicted, "descent there, predicted", needs=needs),
    ]
    for i, share in enumerate(cfg.shares):
        words = f"descent there at {share:g} of the ceiling"
        found.append(Piece(settled_descent(i), partial(taken, share), words, kind="descents", needs=needs))
    return found


def _plane(cfg: Config, problem: Problem, pairs: Result) -> LossPlane:
    engine: Any = cfg.engine
    return loss_plane(
        problem,
        _column(problem, pairs, 0),
        "gradient",
        num_points=cfg.plane_points,
        tolerance=cfg.tolerance,
        engine=engine,
    )


def _column(problem: Problem, pairs: Result, i: int) -> Tensor:
    """An eigenvector."""
    vectors = _as(Eigenpairs, pairs).vectors
    assert vectors is not None
    return vectors[:, i].to(problem.device)  # from a file they are on the CPU


def _told(name: str) -> Callable[[Result], str]:
    def answer(found: Result) -> str:
        one = _as(LossLine, found)
        return f"{name}: the quadratic holds up to a distance of {one.distance():.3g}"

    return answer


def _as(kind: type[R], found: Result) -> R:
    assert isinstance(found, kind)
    return found
