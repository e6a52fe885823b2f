"""Study of curvature-aware optimizers at equal steps, equal work and equal time.

It tunes SGD, AdamW and the optimizers of `cs.optim` in the same way, and trains addition and a tiny GPT from
random weights. The study reports measurements and does not select a winner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Shown
from curvescope.studies.optimizers.analysis import (
    ARENAS,
    BUDGETS,
    CONTENDERS,
    SHARE,
    RateSearch,
    TrainingRun,
    begin,
    go_on,
    make_arena,
    run_course,
)

TUNING = 0  # seed of the trials; the runs use the seeds after it
BY_PAIR = ("trials", "courses", "searches")
FULL = {"seeds": 8, "budget": 8.0, "looks": 33, "max_trials": 12}
"""Settings that the profile `full` uses instead of the defaults."""


@dataclass(frozen=True)
class Config(BaseConfig):
    """Optimizers, tasks and effort. The defaults take a few minutes on a CPU."""

    optimizers: tuple[str, ...] = setting(tuple(CONTENDERS), "optimizers to compare")
    arenas: tuple[str, ...] = setting(tuple(ARENAS), "training tasks: addition, tiny-gpt")
    rates: tuple[float, ...] = setting(
        (0.001, 0.01, 0.1, 1.0), "first learning rates of the search, tried with a quarter of the budget"
    )
    max_trials: int = setting(
        9, "most steps of the search with the full budget; the first one tries half of `rates`", least=3
    )
    seeds: int = setting(4, "training runs with the best rate; tuning uses another seed", least=2)
    budget: float = setting(
        1.0, "budget of a run, as a multiple of 150 gradients on addition and 35 on tiny-gpt"
    )
    looks: int = setting(13, "measurements of the held-out loss per run, the first before training", least=2)
    batch_size: int = setting(16, "sequences per training step", least=1)
    device: str = setting("cpu", "device: cpu, cuda, …")
    seed: int = setting(0, "seed of weights and batches")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("optimizers", CONTENDERS), ("arenas", ARENAS)):
            for value in getattr(self, name):
                if value not in known:
                    raise UsageError(f"{name}: unknown {value!r}", hint=near_misses(value, list(known)))
            if not getattr(self, name) or len(set(getattr(self, name))) < len(getattr(self, name)):
                raise UsageError(
                    f"expected at least one of {name}, each only once, got {getattr(self, name)}"
                )
        if not self.rates or not all(rate > 0 for rate in self.rates) or not self.budget > 0:
            raise UsageError("expected learning rates above 0 and a budget above 0")


@dataclass(frozen=True)
class OptimizerComparison(Shown):
    """Trials and runs of every optimizer in every arena, with keys `arena/optimizer`."""

    arenas: list[str]
    optimizers: list[str]
    rates: list[float]  # first learning rates of the search
    seeds: int
    trials: dict[str, np.ndarray]  # (rates,) losses at the end of the first trials
    courses: dict[str, list[TrainingRun]]  # one per seed
    # Empty in older results, whose first trials had the full budget.
    searches: dict[str, RateSearch] = field(default_factory=dict)

    def of(self, arena: str, optimizer: str) -> list[TrainingRun]:
        """Return the runs with the best rate."""
        return self.courses[f"{arena}/{optimizer}"]

    def rate(self, arena: str, optimizer: str) -> float:
        """Return the best rate of the search."""
        return self.of(arena, optimizer)[0].rate

    def at_edge(self, arena: str, optimizer: str) -> bool:
        """Return True if the best rate is the smallest or largest tried: a better one may lie beyond."""
        if search := self.searches.get(f"{arena}/{optimizer}"):
            return not search.inside
        return self.rate(arena, optimizer) in (min(self.rates), max(self.rates))


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> OptimizerComparison:
    """Tune every optimizer, then run it."""
    pairs = [(arena, name) for arena in cfg.arenas for name in cfg.optimizers]
    pieces = [piece for arena, name in pairs for piece in _pieces(cfg, arena, name)]
    results = work_through(pieces, progress=progress, state=state)

    def courses(arena: str, name: str, kind: str, count: int) -> list[TrainingRun]:
        return [results.take(TrainingRun, piece) for piece in _names(arena, name, kind, count)]

    def first(arena: str, name: str) -> np.ndarray:
        return np.array([course.final for course in courses(arena, name, "rate", len(cfg.rates))])

    return OptimizerComparison(
        arenas=list(cfg.arenas),
        optimizers=list(cfg.optimizers),
        rates=list(cfg.rates),
        seeds=cfg.seeds,
        trials={f"{a}/{n}": first(a, n) for a, n in pairs},
        courses={f"{a}/{n}": courses(a, n, "seed", cfg.seeds) for a, n in pairs},
        searches={
            f"{a}/{n}": results.take(RateSearch, _names(a, n, "trial", cfg.max_trials)[-1]) for a, n in pairs
        },
    )


def merge(parts: Sequence[OptimizerComparison]) -> OptimizerComparison:
    """Merge results for single arenas and optimizers that share all other settings."""
    first = parts[0]
    if any((part.rates, part.seeds) != (first.rates, first.seeds) for part in parts):
        raise UsageError("expected results with the same rates and seeds")
    both = {name: {k: v for part in parts for k, v in getattr(part, name).items()} for name in BY_PAIR}
    arenas = list(dict.fromkeys(arena for part in parts for arena in part.arenas))
    optimizers = list(dict.fromkeys(name for part in parts for name in part.optimizers))
    return replace(first, arenas=arenas, optimizers=optimizers, **both)


def _names(arena: str, optimizer: str, kind: str, count: int) -> list[str]:
    """Return the names of the pieces of one kind."""
    return [f"{arena}.{optimizer}.{kind}{number}" for number in range(count)]


def _pieces(cfg: Config, arena: str, optimizer: str) -> list[Piece]:
    """Return the pieces of one optimizer: first trials, the search, and the runs with the best rate."""
    course, where = partial(_course, cfg, arena, optimizer), f"{optimizer} on {arena}"
    first, trials, runs = (
        _names(arena, optimizer, kind, count)
        for kind, count in (("rate", len(cfg.rates)), ("trial", cfg.max_trials), ("seed", cfg.seeds))
    )

    def trial(rate: float) -> float:
        return course(rate, TUNING, looks=2).final

    def first_search(*known: Result) -> RateSearch:
        return begin(cfg.rates, [run.final for run in known if isinstance(run, TrainingRun)], trial)

    def next_search(search: Result) -> RateSearch:
        assert isinstance(search, RateSearch)
        return go_on(search, trial)

    def final_run(seed: int, search: Result) -> TrainingRun:
        assert isinstance(search, RateSearch)
        return course(search.best, seed)

    pieces = [
        Piece(name, partial(course, rate, TUNING, share=SHARE, looks=2), f"{where}, lr {rate:g}")
        for name, rate in zip(first, cfg.rates, strict=True)
    ]
    pieces.append(Piece(trials[0], first_search, f"{where}, better half of the rates", needs=tuple(first)))
    for before, name in pairwise(trials):
        pieces.append(Piece(name, next_search, f"{where}, neighboring rates", needs=(before,)))
    for i, name in enumerate(runs):
        words = f"{where}, seed {i + 1}"
        pieces.append(Piece(name, partial(final_run, TUNING + 1 + i), words, needs=(trials[-1],)))
    return pieces


def _course(
    cfg: Config,
    arena: str,
    optimizer: str,
    rate: float,
    seed: int,
    *,
    share: float = 1.0,
    looks: int | None = None,
) -> TrainingRun:
    place = make_arena(arena, 1000 * cfg.seed + seed, cfg.batch_size, cfg.device)
    budget = share * cfg.budget * BUDGETS[arena]
    return run_course(place, optimizer, rate, seed, budget, looks or cfg.looks)
