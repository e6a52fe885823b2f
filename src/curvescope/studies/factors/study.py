"""The study `factors`: how far K-FAC and its friends are from the truth, and whether that matters.

A small Transformer is trained, and at checkpoints of its training every approximation is compared with the
exact GGN and the exact Hessian, block by block and as a whole, and takes one step of the best length. Then
each is the preconditioner of an optimizer of its own, tuned alike, from the same random weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.numbers import plural
from curvescope.core.progress import Progress
from curvescope.data.tasks import task_data
from curvescope.models.load import load
from curvescope.models.zoo.transformer import TransformerConfig
from curvescope.problem import Problem
from curvescope.runs.shown import Shown
from curvescope.runs.work import Finished, Piece, State, work_through
from curvescope.studies.factors.analysis import (
    APPROXIMATIONS,
    MEASURES,
    Ahead,
    Course,
    Descent,
    Measured,
    Tuned,
    Workers,
    descend,
    measure,
    places,
    train_one,
    tune,
)

if TYPE_CHECKING:
    pass


def tuning_notes(tuned: list[Tuned]) -> list[str]:
    """What a reader should know of the tuning."""
    return [
        f"{one.method}: {plural(len(one.loss), 'trial')} did not settle the rate and the damping"
        for one in tuned
        if not one.settled
    ]


DIGITS, HEADS = 2, 2
TUNING = 0  # the seed on which rates and dampings are tuned, before those of the runs
FULL = {
    "layers": 2,
    "width": 12,
    "sequences": 64,
    "seeds": 8,
    "checkpoints": (0, 3, 10, 30, 100, 300, 1000),
    "every": 5,
}
"""What the profile `full` takes instead of the defaults."""


@dataclass(frozen=True)
class Config(BaseConfig):
    """Which network, and how long. The defaults take a few minutes on a CPU."""

    layers: int = setting(1, "of the Transformer")
    width: int = setting(8, "of its stream; a multiple of 4, the feed-forward layer is twice as wide")
    sequences: int = setting(48, "sums that it is trained on, all at every step")
    seeds: int = setting(3, "of weights and sums, each with a training of its own")
    checkpoints: tuple[int, ...] = setting((0, 3, 10, 30, 100, 300), "steps of Adam after which is measured")
    lr: float = setting(0.01, "of Adam, on whose way the checkpoints lie")
    approximations: tuple[str, ...] = setting(tuple(APPROXIMATIONS), "of those that are known")
    damping: float = setting(0.1, "of the distances that invert, in units of the mean diagonal")
    dampings: tuple[float, ...] = setting((0.01, 0.1, 1.0, 10.0), "tried by single steps, in these units")
    steps: int = setting(60, "of every optimizer; 0: none is run")
    every: int = setting(10, "steps between one curvature and the next")
    trials: int = setting(16, "most runs to tune the rate and the damping of an optimizer")
    draws: int = setting(1000, "of the bootstrap")
    workers: int = setting(1, "processes of one thread that share the work; 1: none but this one")
    seed: int = setting(0, "of everything random")

    def __post_init__(self) -> None:
        as_tuples(self, "checkpoints", "approximations", "dampings")
        super().__post_init__()
        at_least(self, 1, "layers", "sequences", "every", "workers")
        at_least(self, 2, "seeds", "trials")
        at_least(self, 0, "steps")
        at_least(self, 50, "draws")
        if self.width < 4 or self.width % 4:
            raise UsageError(f"width: expected a multiple of 4, got {self.width}")
        if len(self.checkpoints) < 2 or any(a >= b for a, b in pairwise((-1, *self.checkpoints))):
            raise UsageError(f"expected checkpoints from 0 on that grow, got {self.checkpoints}")
        if not self.dampings or any(not value > 0 for value in (self.lr, self.damping, *self.dampings)):
            raise UsageError("expected lr, damping and dampings above 0")
        for name in self.approximations:
            if name not in APPROXIMATIONS:
                hint = near_misses(name, list(APPROXIMATIONS))
                raise UsageError(f"expected an approximation, got {name!r}", hint=hint)
        if len(set(self.approximations)) < max(len(self.approximations), 3):
            raise UsageError(f"expected three approximations or more, each once, got {self.approximations}")


def make_problem(cfg: Config, number: int) -> Problem:
    """The Transformer at random weights, on sums of two numbers of two digits.

    It is pre-norm, and all that it learns is the matrix of a linear map: norms have no gains, positions are
    rotary, nothing has a bias. So every parameter is in a block, and every block has factors.
    """
    seed = 1000 * cfg.seed + number
    shape = TransformerConfig(
        n_layers=cfg.layers,
        d_model=cfg.width,
        n_heads=HEADS,
        d_ff=2 * cfg.width,
        n_ctx=3 * DIGITS + 3,
        vocab_size=12,
        norm_affine=False,
        positions="rope",
        bias_qkv=False,
        bias_o=False,
        bias_ff=False,
        init="scaled",
        seed=seed,
    )
    data = task_data("addition", num_sequences=cfg.sequences, digits=DIGITS, seed=seed)
    return Problem(load(shape, dtype="float64"), data)


# ------------------------------------------------------------------------------------------------------ study


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
        notes=tuning_notes(tuned),
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
