"""The pieces of the study `taylor`, and their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from curvescope.algorithms import Eigenpairs, QuadraticDescent
from curvescope.core.result import Result
from curvescope.models.model import Model
from curvescope.operators import LossLine, LossPlane, loss_line, loss_plane
from curvescope.operators.taylor.directions import own_vector
from curvescope.problem import Problem
from curvescope.runs.work import Piece
from curvescope.studies.taylor.descent import (
    Descent,
    Settled,
    adam_direction,
    descend,
    near,
    predict,
    settle,
    settled_line,
    settled_problem,
    top_pairs,
)

if TYPE_CHECKING:
    from curvescope.studies.taylor.study import Config

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
