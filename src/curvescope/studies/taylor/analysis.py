"""Gradient descent on all data, measured and predicted, at the model and next to a point that fits the data.

A *settled* point θ* fits the data; Adam finds it. The remaining gradient at θ* would hide the effect of the
ceiling 2/λ_max, which holds at stationary points. Descent near θ* is therefore on the loss without its slope,
L(θ) − ∇L(θ*)ᵀ(θ − θ*): its gradient is zero at θ*, and all higher derivatives equal those of L.
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
from curvescope.operators.taylor.directions import dot, parameter_vector
from curvescope.problem import Problem
from curvescope.runs.resumable_loop import Piece

if TYPE_CHECKING:
    from curvescope.studies.taylor.study import Config

# Start of the descent near a settled point, relative to the radius of the quadratic.
NEAR = {torch.float64: 1e-3}
NEAR_ROUNDED = 0.03  # for other types, because rounding errors would be visible at a smaller distance
WITHIN = 0.05  # error relative to the largest change so far, within which a trajectory counts as predicted
ADAM_EPS = 1e-8
LEAST = 30.0  # a descent has diverged if its final gradient is this many times the initial one


@dataclass(frozen=True)
class DescentRun(Result):
    """K steps of gradient descent with one learning rate; nan after a step that is not finite."""

    share: float  # learning rate as a share of 2/λ_max
    learning_rate: float
    change: np.ndarray  # (K + 1,) change of the loss, zero at the start
    gradient_norm: np.ndarray  # (K + 1,)
    along: np.ndarray  # (K + 1,) component of the gradient along the top eigenvector at the start
    sharpness: float  # λ_max at the end; nan if not measured

    @property
    def num_finite(self) -> int:
        """Number of points with finite values, including the start."""
        return int(np.isfinite(self.change).sum())

    @property
    def diverged(self) -> bool:
        """Return True if the descent became non-finite, or its gradient grew far beyond the initial one."""
        last = self.gradient_norm[self.num_finite - 1]
        return self.num_finite < len(self.change) or bool(last > LEAST * self.gradient_norm[0])

    def errors(self, predicted: np.ndarray) -> np.ndarray:
        """Error of the predicted change at every step, relative to the largest change so far: (K + 1,)."""
        largest = np.maximum.accumulate(np.abs(np.nan_to_num(self.change)))
        errors = np.abs(predicted - self.change) / np.where(largest > 0, largest, 1.0)
        return np.where(np.isfinite(errors), errors, math.inf)

    def steps_within(self, predicted: np.ndarray, share: float = WITHIN) -> int:
        """Last step up to which the relative error of the predicted change is at most `share`."""
        outside = np.flatnonzero(self.errors(predicted) > share)
        return int(outside[0]) - 1 if len(outside) else len(self.change) - 1


@dataclass(frozen=True)
class Settled(Result):
    """A point that fits the data, found by Adam from θ on all data."""

    theta: np.ndarray  # (n,) in the type of the parameters
    losses: np.ndarray  # before each step, and at the end
    goal: float  # the loss at which it stops

    @property
    def reached(self) -> bool:
        """Return True if the loss reached the goal."""
        return bool(self.losses.min() <= self.goal)


def adam_direction(problem: Problem) -> Tensor:
    """Adam's update per learning rate, −m/(√v + ε), with the moments m and v of the sequences' gradients at
    θ.

    Adam's averages converge to these moments if θ stays fixed and every step sees one sequence, drawn in
    proportion to its weight.
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
            f"λ_max is {top:.3g}, so the learning rate of gradient descent has no ceiling here",
            hint="set --set shares=[] to skip gradient descent",
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
) -> DescentRun:
    """Run gradient descent from a vector over all blocks; the learning rate is a share of the ceiling.

    Args:
        pairs: Eigenpairs; the gradient along the first eigenvector is recorded.
        tilt: A gradient that is subtracted at every step.
        measure: True to measure λ_max at the end.
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
    sharpness = math.nan
    if measure and len(rows) == num_steps + 1:
        sharpness = float(eigsh(Hessian(problem.at(last)), 1, which="LA", tol=1e-3, v0=v).values[0])
    return DescentRun(share, rate, *columns, sharpness=sharpness)


def predict(
    problem: Problem, g: Tensor, pairs: Eigenpairs, shares: tuple[float, ...], num_steps: int
) -> QuadraticDescent:
    """Predict descent from the quadratic at the problem's point, for these shares of the ceiling."""
    return quadratic_descent(Hessian(problem), g, [share * ceiling(pairs) for share in shares], num_steps)


def settle(problem: Problem, goal: float, num_steps: int, rate: float) -> Settled:
    """Run Adam on all data until the loss is at most `goal`; return the best point of the run."""
    theta = parameter_vector(problem).clone()
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
    """Return the problem at θ*."""
    return problem.at(torch.as_tensor(settled.theta).to(problem.device, problem.dtype))


def away(problem: Problem, pairs: Eigenpairs) -> Tensor:
    """Return the unit direction of v + g/‖g‖: the top eigenvector and the gradient."""
    g, v = problem.gradient(), _vectors(pairs)[:, 0].to(problem.device)
    along = v * (1.0 if dot(g, v) >= 0 else -1.0)
    direction = along + (g / math.sqrt(dot(g, g)) if bool((g != 0).any()) else 0)
    return direction / math.sqrt(dot(direction, direction))


def near(problem: Problem, pairs: Eigenpairs, along: LossLine) -> tuple[Tensor, Tensor]:
    """Return the start of descent near θ*, in the quadratic regime along `away`, and the gradient at θ*."""
    radius = along.radius(2)
    step = NEAR.get(problem.dtype, NEAR_ROUNDED) * (
        radius if math.isfinite(radius) else float(np.abs(along.t).max())
    )
    return parameter_vector(problem) + step * away(problem, pairs), problem.gradient()


def top_pairs(problem: Problem, k: int, seed: int) -> Eigenpairs:
    """Return the largest eigenvalues of the Hessian with eigenvectors v such that gᵀv ≤ 0: the loss falls
    ahead along v.

    Otherwise the sign of an eigenvector would depend on rounding, and ahead and behind could swap.
    """
    pairs = eigsh(Hessian(problem), min(k, problem.space().size), which="LA", seed=seed)
    slopes = problem.gradient() @ _vectors(pairs)
    return replace(pairs, vectors=torch.where(slopes > 0, -1, 1) * _vectors(pairs))


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
    """Name of the piece of one learning rate."""
    return f"descent.{number}"


def settled_descent(number: int) -> str:
    """Name of the piece of one learning rate next to a settled point."""
    return f"settled.descent.{number}"


def lines(cfg: Config, problem: Problem, other: Model | None) -> dict[str, Piece]:
    """Return the pieces for the sharpest directions, for lines by their direction, and for a plane."""
    options: dict[str, Any] = {
        "num_points": cfg.num_points, "tolerance": cfg.tolerance, "cubic": cfg.cubic, "engine": cfg.engine
    }  # fmt: skip

    def along(name: str, **given: Any) -> Piece:
        work = partial(loss_line, problem, **options, **given)
        return Piece(f"line.{name.replace(' ', '_')}", work, f"along {name}", _line_message(name), "lines")

    def top(i: int) -> Piece:
        def work(pairs: Result) -> LossLine:
            return loss_line(problem, _column(problem, pairs, i), **options)

        name = f"eigenvector {i + 1}"
        return Piece(f"line.top_{i}", work, f"along {name}", _line_message(name), "lines", needs=(SHARP,))

    def update() -> LossLine:
        return loss_line(problem, adam_direction(problem), **options)

    pieces = {SHARP: Piece(SHARP, partial(top_pairs, problem, cfg.num_top, cfg.seed), "sharpest directions")}
    pieces["gradient"] = along("gradient", direction="gradient")
    if cfg.update:
        pieces["Adam's update"] = Piece(
            "line.update", update, "along an update", _line_message("Adam's update"), "lines"
        )
    pieces |= {f"eigenvector {i + 1}": top(i) for i in range(min(cfg.num_top, problem.space().size))}
    for i in range(cfg.num_random):
        name = "random" if cfg.num_random == 1 else f"random {i + 1}"
        pieces[name] = along(name, direction="random", seed=cfg.seed + i)
    if other is not None:
        pieces["checkpoint"] = along("checkpoint", to=other)
    if cfg.plane_points:
        pieces[PLANE] = Piece(PLANE, partial(_plane, cfg, problem), "plane", needs=(SHARP,))
    return pieces


def descents(cfg: Config, problem: Problem) -> list[Piece]:
    """Return the piece of the prediction at the model, and a descent for each learning rate."""
    if not cfg.shares:
        return []

    def predicted(pairs: Result) -> QuadraticDescent:
        return predict(problem, problem.gradient(), _as(Eigenpairs, pairs), cfg.shares, cfg.num_steps)

    def measured(share: float, pairs: Result) -> DescentRun:
        return descend(problem, parameter_vector(problem), _as(Eigenpairs, pairs), share, cfg.num_steps)

    pieces = [Piece(PREDICTED, predicted, "predicted gradient descent", needs=(SHARP,))]
    for i, share in enumerate(cfg.shares):
        words = f"gradient descent at {share:g} of the ceiling"
        pieces.append(Piece(descent(i), partial(measured, share), words, kind="descents", needs=(SHARP,)))
    return pieces


def settled(cfg: Config, problem: Problem) -> list[Piece]:
    """Return the pieces for a point that fits the data, and for descent next to it."""
    if not cfg.shares or not cfg.settle:
        return []
    needs = (SETTLED, SETTLED_SHARP, SETTLED_LINE)

    def fitted() -> Settled:
        return settle(problem, cfg.settle * problem.loss_value(), cfg.fit_steps, cfg.fit_rate)

    def sharp(point: Result) -> Eigenpairs:
        return top_pairs(settled_problem(problem, _as(Settled, point)), 1, cfg.seed)

    def along(point: Result, pairs: Result) -> LossLine:
        here = settled_problem(problem, _as(Settled, point))
        direction = away(here, _as(Eigenpairs, pairs))
        return loss_line(here, direction, num_points=21, tolerance=cfg.tolerance, cubic=False)

    def predicted(point: Result, pairs: Result, way: Result) -> QuadraticDescent:
        here = settled_problem(problem, _as(Settled, point))
        start, tilt = near(here, _as(Eigenpairs, pairs), _as(LossLine, way))
        g = here.at(start).gradient() - tilt
        return predict(here, g, _as(Eigenpairs, pairs), cfg.shares, cfg.num_steps)

    def measured(share: float, point: Result, pairs: Result, way: Result) -> DescentRun:
        here = settled_problem(problem, _as(Settled, point))
        start, tilt = near(here, _as(Eigenpairs, pairs), _as(LossLine, way))
        top = _as(Eigenpairs, pairs)
        return descend(here, start, top, share, cfg.num_steps, tilt=tilt, measure=False)

    pieces = [
        Piece(SETTLED, fitted, "settling"),
        Piece(SETTLED_SHARP, sharp, "λ_max at the settled point", needs=(SETTLED,)),
        Piece(SETTLED_LINE, along, "line at the settled point", needs=(SETTLED, SETTLED_SHARP)),
        Piece(SETTLED_PREDICTED, predicted, "predicted descent at the settled point", needs=needs),
    ]
    for i, share in enumerate(cfg.shares):
        words = f"descent at the settled point, {share:g} of the ceiling"
        pieces.append(
            Piece(settled_descent(i), partial(measured, share), words, kind="descents", needs=needs)
        )
    return pieces


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
    """Return an eigenvector on the device of the problem."""
    vectors = _as(Eigenpairs, pairs).vectors
    assert vectors is not None
    return vectors[:, i].to(problem.device)  # eigenpairs read from a file are on the CPU


def _line_message(name: str) -> Callable[[Result], str]:
    def answer(result: Result) -> str:
        line = _as(LossLine, result)
        return f"{name}: the quadratic holds up to a distance of {line.distance():.3g}"

    return answer


def _as(kind: type[R], result: Result) -> R:
    assert isinstance(result, kind)
    return result
