"""The study `factors`: how far K-FAC and its friends are from the truth, and whether that matters.

A small Transformer is trained, and at checkpoints of its training every approximation is compared with the
exact GGN and the exact Hessian, block by block and as a whole, and takes one step of the best length. Then
each is the preconditioner of an optimizer of its own, tuned alike, from the same random weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.progress import Progress
from curvescope.runs.shown import Claim, Line, Shown
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.factors import claims, tables, words
from curvescope.studies.factors.ahead import Ahead, Workers
from curvescope.studies.factors.checkpoint import Course, Measured, measure, train_one
from curvescope.studies.factors.descent import Descent, Tuned, descend, tune
from curvescope.studies.factors.distances import MEASURES
from curvescope.studies.factors.matrices import places
from curvescope.studies.factors.setting import TUNING, Config, make_problem

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Factors(Shown):
    """M approximations at C checkpoints of S trainings, over B blocks, and as optimizers."""

    blocks: list[str]
    sizes: list[int]
    approximations: list[str]
    checkpoints: list[int]
    loss: np.ndarray  # (S, C) on the way of Adam
    whole: np.ndarray  # (S, C, 6, M) distances by MEASURES
    parts: np.ndarray  # (S, C, 6, M, B) of single blocks
    between: np.ndarray  # (S, C, 2) the share of ‖·‖² between blocks, of the GGN and of the Hessian
    decrease: np.ndarray  # (S, C, M) of the loss by the best single step
    tuned: list[Tuned]  # by approximation; empty where no optimizer is run
    courses: np.ndarray  # (S, M, steps + 1) losses of the optimizers
    damping: float
    every: int
    draws: int
    seed: int

    def distance(self, measure: str) -> np.ndarray:
        """Of the whole matrix: (S, C, M)."""
        return self.whole[:, :, MEASURES.index(measure)]

    def of(self, measure: str, name: str) -> np.ndarray:
        """Of the whole matrix from one approximation: (S, C)."""
        return self.distance(measure)[..., self.approximations.index(name)]

    @property
    def final(self) -> np.ndarray:
        """The losses of the optimizers at the end: (S, M)."""
        return self.courses[..., -1]

    def claims(self) -> list[Claim]:
        """What is said about approximations, next to what was measured."""
        return claims.judge(self)

    def opening(self) -> str:
        """What distances say of steps and optimizers, in sentences."""
        return words.opening(self)

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Distances, optimizers, correlations, trials and claims."""
        return tables.frames(self)

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.studies.factors import figures

        return figures.draw(self)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Factors:
    """Train, measure, tune, and run the optimizers.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    with Workers(cfg.workers) as workers:
        found = work_through(_pieces(cfg, workers), progress=progress, state=state)
    each = [[found.take(Measured, _at(s, k)) for k in range(len(cfg.checkpoints))] for s in range(cfg.seeds)]
    slices = places(make_problem(cfg, TUNING))
    tuned = [found.take(Tuned, _tuning(name)) for name in cfg.approximations] if cfg.steps else []
    return Factors(
        blocks=list(slices),
        sizes=[s.stop - s.start for s in slices.values()],
        approximations=list(cfg.approximations),
        checkpoints=list(cfg.checkpoints),
        loss=_stacked(each, "loss"),
        whole=_stacked(each, "whole"),
        parts=_stacked(each, "blocks"),
        between=_stacked(each, "between"),
        decrease=_stacked(each, "decrease"),
        tuned=tuned,
        courses=_courses(cfg, found),
        damping=cfg.damping,
        every=cfg.every,
        draws=cfg.draws,
        seed=cfg.seed,
        notes=words.notes(tuned),
    )


def _stacked(each: list[list[Measured]], name: str) -> np.ndarray:
    return np.array([[getattr(one, name) for one in row] for row in each])


def _courses(cfg: Config, found: Finished) -> np.ndarray:
    if not cfg.steps:
        return np.zeros((cfg.seeds, len(cfg.approximations), 0))
    names = cfg.approximations
    return np.array(
        [[found.take(Descent, _descent(s, name)).loss for name in names] for s in range(cfg.seeds)]
    )


def _course(s: int) -> str:
    return f"seed{s}.course"


def _at(s: int, k: int) -> str:
    return f"seed{s}.checkpoint{k}"


def _tuning(name: str) -> str:
    return f"tuning.{name}"


def _descent(s: int, name: str) -> str:
    return f"seed{s}.descent.{name}"


def _pieces(cfg: Config, workers: Workers) -> list[Piece]:
    """Trainings, checkpoints, tunings, runs; all of a kind need all of the kind before."""
    seeds = list(range(cfg.seeds))
    courses = Ahead(partial(_train, cfg), seeds, workers)
    found = [Piece(_course(s), partial(courses.take, s), f"training, seed {s + 1}") for s in seeds]
    trained = tuple(_course(s) for s in seeds)
    cells = [(s, k) for s in seeds for k in range(len(cfg.checkpoints))]
    points = Ahead(partial(_measure, cfg), cells, workers)
    for s, k in cells:
        told = f"seed {s + 1}, after {cfg.checkpoints[k]} steps"
        found.append(Piece(_at(s, k), partial(points.take, (s, k)), told, kind="checkpoints", needs=trained))
    return found + (_optimizers(cfg, seeds, workers) if cfg.steps else [])


def _optimizers(cfg: Config, seeds: list[int], workers: Workers) -> list[Piece]:
    trials = Ahead(partial(_tune, cfg), cfg.approximations, workers)
    found = [
        Piece(_tuning(name), partial(trials.take, name), f"tuning {name}", kind="tunings")
        for name in cfg.approximations
    ]
    tuned = tuple(_tuning(name) for name in cfg.approximations)
    pairs = [(s, name) for s in seeds for name in cfg.approximations]
    runs = Ahead(partial(_descend, cfg), pairs, workers)
    for s, name in pairs:
        told = f"{name}, seed {s + 1}"
        work = partial(runs.take, (s, name))
        found.append(Piece(_descent(s, name), work, told, kind="optimizers", needs=tuned))
    return found


def _train(cfg: Config, s: int) -> Course:
    return train_one(cfg, make_problem(cfg, TUNING + 1 + s))


def _measure(cfg: Config, cell: tuple[int, int], *courses: Course) -> Measured:
    s, k = cell
    return measure(cfg, make_problem(cfg, TUNING + 1 + s), courses[s].theta[k])


def _tune(cfg: Config, name: str) -> Tuned:
    problem = make_problem(cfg, TUNING)
    return tune(problem, name, steps=cfg.steps, every=cfg.every, trials=cfg.trials)


def _descend(cfg: Config, pair: tuple[int, str], *tuned: Tuned) -> Descent:
    s, name = pair
    best = tuned[cfg.approximations.index(name)]
    problem = make_problem(cfg, TUNING + 1 + s)
    return descend(problem, name, rate=best.rate, damping=best.damping, steps=cfg.steps, every=cfg.every)
