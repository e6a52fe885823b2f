"""The study `factors`: distance of K-FAC and similar factorizations from the exact curvature, and its
effect on steps.

The study trains a small Transformer. At checkpoints it compares every approximation with the exact GGN and
Hessian, per block and for the whole matrix, and measures one step of the best length. Then each
approximation preconditions an optimizer; all are tuned in the same way and start from the same random
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.number_format import plural
from curvescope.core.progress import Progress
from curvescope.data.tasks import task_data
from curvescope.models.load import load
from curvescope.models.zoo.transformer import TransformerConfig
from curvescope.problem import Problem
from curvescope.runs.resumable_loop import FinishedPieces, Piece, State, work_through
from curvescope.runs.study_result import Shown
from curvescope.studies.factors import analysis


def tuning_notes(tuned: list[analysis.Tuned]) -> list[str]:
    """Return notes on the tuning."""
    return [
        f"{one.method}: {plural(len(one.loss), 'trial')} were not enough to find the best rate and damping"
        for one in tuned
        if not one.settled
    ]


DIGITS, HEADS = 2, 2
TUNING = 0  # seed for tuning rates and dampings; the runs use the next seeds
FULL = {
    "layers": 2,
    "width": 12,
    "sequences": 64,
    "seeds": 8,
    "checkpoints": (0, 3, 10, 30, 100, 300, 1000),
    "every": 5,
}
"""Settings of the profile `full`."""


@dataclass(frozen=True)
class Config(BaseConfig):
    """Network, training and optimizers. The defaults take a few minutes on a CPU."""

    layers: int = setting(1, "layers of the Transformer", least=1)
    width: int = setting(
        8, "width of the residual stream, a multiple of 4; the feed-forward layer is twice as wide"
    )
    sequences: int = setting(48, "number of training sums, all used in every step", least=1)
    seeds: int = setting(3, "number of seeds of weights and sums, each with its own training run", least=2)
    checkpoints: tuple[int, ...] = setting(
        (0, 3, 10, 30, 100, 300), "steps of Adam at which the study measures"
    )
    lr: float = setting(0.01, "learning rate of Adam, which produces the checkpoints")
    approximations: tuple[str, ...] = setting(tuple(analysis.APPROXIMATIONS), "approximations to compare")
    damping: float = setting(0.1, "damping of divergence and lost decrease, in units of the mean diagonal")
    dampings: tuple[float, ...] = setting(
        (0.01, 0.1, 1.0, 10.0), "dampings tried by single steps, in the same units"
    )
    steps: int = setting(60, "steps of every optimizer; 0 runs none", least=0)
    every: int = setting(10, "steps between updates of the curvature", least=1)
    trials: int = setting(16, "maximum number of runs to tune rate and damping of an optimizer", least=2)
    draws: int = setting(1000, "resamples of the bootstrap", least=50)
    workers: int = setting(1, "single-threaded processes that share the work; 1: only this process", least=1)
    seed: int = setting(0, "seed of all random numbers")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width < 4 or self.width % 4:
            raise UsageError(f"width: expected a multiple of 4, got {self.width}")
        if len(self.checkpoints) < 2 or any(a >= b for a, b in pairwise((-1, *self.checkpoints))):
            raise UsageError(f"expected checkpoints from 0 on that grow, got {self.checkpoints}")
        if not self.dampings or any(not value > 0 for value in (self.lr, self.damping, *self.dampings)):
            raise UsageError("expected lr, damping and dampings above 0")
        for name in self.approximations:
            if name not in analysis.APPROXIMATIONS:
                hint = near_misses(name, list(analysis.APPROXIMATIONS))
                raise UsageError(f"expected an approximation, got {name!r}", hint=hint)
        if len(set(self.approximations)) < max(len(self.approximations), 3):
            raise UsageError(f"expected three approximations or more, each once, got {self.approximations}")


def make_problem(cfg: Config, number: int) -> Problem:
    """Build the Transformer with random weights, on sums of two two-digit numbers.

    It is pre-norm, and all its parameters are matrices of linear maps: norms have no gains, positions are
    rotary, and there are no biases. So every parameter is in a block, and every block has factors.
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


@dataclass(frozen=True)
class Factors(Shown):
    """Result for M approximations at C checkpoints of S training runs, over B blocks, and as optimizers."""

    blocks: list[str]
    sizes: list[int]
    approximations: list[str]
    checkpoints: list[int]
    loss: np.ndarray  # (S, C) loss at the checkpoints of Adam
    whole: np.ndarray  # (S, C, 6, M) distances by MEASURES
    parts: np.ndarray  # (S, C, 6, M, B) distances of single blocks
    between: np.ndarray  # (S, C, 2) share of ‖·‖² between blocks, for the GGN and the Hessian
    decrease: np.ndarray  # (S, C, M) decrease of the loss by the best single step
    tuned: list[analysis.Tuned]  # by approximation; empty if no optimizer runs
    courses: np.ndarray  # (S, M, steps + 1) losses of the optimizers
    damping: float
    every: int
    draws: int
    seed: int

    def distance(self, measure: str) -> np.ndarray:
        """Distance of the whole matrix: (S, C, M)."""
        return self.whole[:, :, analysis.MEASURES.index(measure)]

    def of(self, measure: str, name: str) -> np.ndarray:
        """Distance of the whole matrix for one approximation: (S, C)."""
        return self.distance(measure)[..., self.approximations.index(name)]

    @property
    def final(self) -> np.ndarray:
        """Final losses of the optimizers: (S, M)."""
        return self.courses[..., -1]


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Factors:
    """Train, measure, tune, and run the optimizers."""
    with analysis.Workers(cfg.workers) as workers:
        found = work_through(_pieces(cfg, workers), progress=progress, state=state)
    each = [
        [found.take(analysis.Measured, _at(s, k)) for k in range(len(cfg.checkpoints))]
        for s in range(cfg.seeds)
    ]
    slices = analysis.places(make_problem(cfg, TUNING))
    tuned = [found.take(analysis.Tuned, _tuning(name)) for name in cfg.approximations] if cfg.steps else []
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


def _stacked(each: list[list[analysis.Measured]], name: str) -> np.ndarray:
    return np.array([[getattr(one, name) for one in row] for row in each])


def _courses(cfg: Config, found: FinishedPieces) -> np.ndarray:
    if not cfg.steps:
        return np.zeros((cfg.seeds, len(cfg.approximations), 0))
    names = cfg.approximations
    return np.array(
        [[found.take(analysis.Descent, _descent(s, name)).loss for name in names] for s in range(cfg.seeds)]
    )


def _course(s: int) -> str:
    return f"seed{s}.course"


def _at(s: int, k: int) -> str:
    return f"seed{s}.checkpoint{k}"


def _tuning(name: str) -> str:
    return f"tuning.{name}"


def _descent(s: int, name: str) -> str:
    return f"seed{s}.descent.{name}"


def _pieces(cfg: Config, workers: analysis.Workers) -> list[Piece]:
    """Return the pieces: training, checkpoints, tuning, runs; each kind needs all of the kind before."""
    seeds = list(range(cfg.seeds))
    courses = analysis.Ahead(partial(_train, cfg), seeds, workers)
    found = [Piece(_course(s), partial(courses.take, s), f"training, seed {s + 1}") for s in seeds]
    trained = tuple(_course(s) for s in seeds)
    cells = [(s, k) for s in seeds for k in range(len(cfg.checkpoints))]
    points = analysis.Ahead(partial(_measure, cfg), cells, workers)
    for s, k in cells:
        told = f"seed {s + 1}, after {cfg.checkpoints[k]} steps"
        found.append(Piece(_at(s, k), partial(points.take, (s, k)), told, kind="checkpoints", needs=trained))
    return found + (_optimizers(cfg, seeds, workers) if cfg.steps else [])


def _optimizers(cfg: Config, seeds: list[int], workers: analysis.Workers) -> list[Piece]:
    trials = analysis.Ahead(partial(_tune, cfg), cfg.approximations, workers)
    found = [
        Piece(_tuning(name), partial(trials.take, name), f"tuning {name}", kind="tunings")
        for name in cfg.approximations
    ]
    tuned = tuple(_tuning(name) for name in cfg.approximations)
    pairs = [(s, name) for s in seeds for name in cfg.approximations]
    runs = analysis.Ahead(partial(_descend, cfg), pairs, workers)
    for s, name in pairs:
        told = f"{name}, seed {s + 1}"
        work = partial(runs.take, (s, name))
        found.append(Piece(_descent(s, name), work, told, kind="optimizers", needs=tuned))
    return found


def _train(cfg: Config, s: int) -> analysis.Course:
    return analysis.train_one(cfg, make_problem(cfg, TUNING + 1 + s))


def _measure(cfg: Config, cell: tuple[int, int], *courses: analysis.Course) -> analysis.Measured:
    s, k = cell
    return analysis.measure(cfg, make_problem(cfg, TUNING + 1 + s), courses[s].theta[k])


def _tune(cfg: Config, name: str) -> analysis.Tuned:
    problem = make_problem(cfg, TUNING)
    return analysis.tune(problem, name, steps=cfg.steps, every=cfg.every, trials=cfg.trials)


def _descend(cfg: Config, pair: tuple[int, str], *tuned: analysis.Tuned) -> analysis.Descent:
    s, name = pair
    best = tuned[cfg.approximations.index(name)]
    problem = make_problem(cfg, TUNING + 1 + s)
    return analysis.descend(
        problem, name, rate=best.rate, damping=best.damping, steps=cfg.steps, every=cfg.every
    )
