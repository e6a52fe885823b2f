"""The study `optimizers`: what curvature buys, at equal steps, equal work and equal time.

SGD, AdamW and the optimizers of `cs.optim`, tuned alike, on addition and on a tiny GPT, each from random
weights. The claim is the measurement and not a winner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.runs.shown import Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.optimizers.analysis import (
    ARENAS,
    BUDGETS,
    CONTENDERS,
    SHARE,
    Course,
    Search,
    begin,
    go_on,
    make_arena,
    run_course,
)

if TYPE_CHECKING:
    pass

TUNING = 0  # the seed of the trials, before those of the runs
BY_PAIR = ("trials", "courses", "searches")
FULL = {"seeds": 8, "budget": 8.0, "looks": 33, "max_trials": 12}
"""What the profile `full` takes instead of the defaults."""


@dataclass(frozen=True)
class Config(BaseConfig):
    """Who is compared, and where. The defaults take a few minutes on a CPU."""

    optimizers: tuple[str, ...] = setting(tuple(CONTENDERS), "of those that are known")
    arenas: tuple[str, ...] = setting(tuple(ARENAS), "addition, tiny-gpt")
    rates: tuple[float, ...] = setting(
        (0.001, 0.01, 0.1, 1.0), "learning rates that each of them tries first, at a quarter of the budget"
    )
    max_trials: int = setting(9, "steps of the search at all of it, the first with half of these rates")
    seeds: int = setting(4, "runs with the best rate, after the trials on a seed of their own")
    budget: float = setting(1.0, "of a run, times 150 gradients on addition and 35 on tiny-gpt")
    looks: int = setting(13, "at the held-out loss in a run, the first before it")
    batch_size: int = setting(16, "sequences of a step")
    device: str = setting("cpu", "cpu, cuda, …")
    seed: int = setting(0, "of weights and batches")

    def __post_init__(self) -> None:
        as_tuples(self, "optimizers", "arenas", "rates")
        super().__post_init__()
        at_least(self, 2, "seeds", "looks")
        at_least(self, 1, "batch_size")
        at_least(self, 3, "max_trials")
        for name, known in (("optimizers", CONTENDERS), ("arenas", ARENAS)):
            for value in getattr(self, name):
                if value not in known:
                    raise UsageError(f"{name}: unknown {value!r}", hint=near_misses(value, list(known)))
            if not getattr(self, name) or len(set(getattr(self, name))) < len(getattr(self, name)):
                raise UsageError(f"expected some {name}, each once, got {getattr(self, name)}")
        if not self.rates or not all(rate > 0 for rate in self.rates) or not self.budget > 0:
            raise UsageError("expected rates above 0 and a budget above 0")


@dataclass(frozen=True)
class Compared(Shown):
    """Trials and runs of every optimizer in every arena, by `arena/optimizer`."""

    arenas: list[str]
    optimizers: list[str]
    rates: list[float]  # of the first trials
    seeds: int
    trials: dict[str, np.ndarray]  # (rates,) losses at the end of the first trials
    courses: dict[str, list[Course]]  # one for each seed
    searches: dict[str, Search] = field(default_factory=dict)  # none: the first trials had the whole budget

    def of(self, arena: str, optimizer: str) -> list[Course]:
        """The runs with the best rate."""
        return self.courses[f"{arena}/{optimizer}"]

    def rate(self, arena: str, optimizer: str) -> float:
        """The best rate of the trials."""
        return self.of(arena, optimizer)[0].rate

    def at_edge(self, arena: str, optimizer: str) -> bool:
        """Whether it is the smallest or the largest that was tried, so that a better one may lie beyond."""
        if search := self.searches.get(f"{arena}/{optimizer}"):
            return not search.inside
        return self.rate(arena, optimizer) in (min(self.rates), max(self.rates))


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Compared:
    """Tune every optimizer, then run it.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    pairs = [(arena, name) for arena in cfg.arenas for name in cfg.optimizers]
    pieces = [piece for arena, name in pairs for piece in _pieces(cfg, arena, name)]
    found = work_through(pieces, progress=progress, state=state)

    def courses(arena: str, name: str, kind: str, count: int) -> list[Course]:
        return [found.take(Course, one) for one in _names(arena, name, kind, count)]

    def first(arena: str, name: str) -> np.ndarray:
        return np.array([course.final for course in courses(arena, name, "rate", len(cfg.rates))])

    return Compared(
        arenas=list(cfg.arenas),
        optimizers=list(cfg.optimizers),
        rates=list(cfg.rates),
        seeds=cfg.seeds,
        trials={f"{a}/{n}": first(a, n) for a, n in pairs},
        courses={f"{a}/{n}": courses(a, n, "seed", cfg.seeds) for a, n in pairs},
        searches={
            f"{a}/{n}": found.take(Search, _names(a, n, "trial", cfg.max_trials)[-1]) for a, n in pairs
        },
    )


def merge(parts: Sequence[Compared]) -> Compared:
    """Results of single arenas and optimizers, of settings that are the same otherwise, as one."""
    first = parts[0]
    if any((part.rates, part.seeds) != (first.rates, first.seeds) for part in parts):
        raise UsageError("expected results of the same rates and seeds")
    both = {name: {k: v for part in parts for k, v in getattr(part, name).items()} for name in BY_PAIR}
    arenas = list(dict.fromkeys(arena for part in parts for arena in part.arenas))
    optimizers = list(dict.fromkeys(name for part in parts for name in part.optimizers))
    return replace(first, arenas=arenas, optimizers=optimizers, **both)


def _names(arena: str, optimizer: str, kind: str, count: int) -> list[str]:
    """Of the pieces of one kind."""
    return [f"{arena}.{optimizer}.{kind}{number}" for number in range(count)]


def _pieces(cfg: Config, arena: str, optimizer: str) -> list[Piece]:
    """The first trials, the search that goes on from them, and the runs with what it has found."""
    course, where = partial(_course, cfg, arena, optimizer), f"{optimizer} on {arena}"
    first, trials, runs = (
        _names(arena, optimizer, kind, count)
        for kind, count in (("rate", len(cfg.rates)), ("trial", cfg.max_trials), ("seed", cfg.seeds))
    )

    def trial(rate: float) -> float:
        return course(rate, TUNING, looks=2).final

    def begun(*known: Result) -> Search:
        return begin(cfg.rates, [one.final for one in known if isinstance(one, Course)], trial)

    def gone_on(search: Result) -> Search:
        assert isinstance(search, Search)
        return go_on(search, trial)

    def ran(seed: int, search: Result) -> Course:
        assert isinstance(search, Search)
        return course(search.best, seed)

    pieces = [
        Piece(name, partial(course, rate, TUNING, share=SHARE, looks=2), f"{where}, lr {rate:g}")
        for name, rate in zip(first, cfg.rates, strict=True)
    ]
    pieces.append(Piece(trials[0], begun, f"{where}, the better half", needs=tuple(first)))
    for before, name in pairwise(trials):
        pieces.append(Piece(name, gone_on, f"{where}, rates beside it", needs=(before,)))
    for i, name in enumerate(runs):
        words = f"{where}, seed {i + 1}"
        pieces.append(Piece(name, partial(ran, TUNING + 1 + i), words, needs=(trials[-1],)))
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
) -> Course:
    place = make_arena(arena, 1000 * cfg.seed + seed, cfg.batch_size, cfg.device)
    budget = share * cfg.budget * BUDGETS[arena]
    return run_course(place, optimizer, rate, seed, budget, looks or cfg.looks)
