"""The study `optimisers`: what curvature buys, at equal steps, equal work and equal time.

SGD, AdamW and the optimisers of `cs.optim`, tuned alike, on addition and on a tiny GPT, each from random
weights. The claim is the measurement and not a winner.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.runs.shown import Claim, Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.optimisers import claims, tables, words
from curvescope.studies.optimisers.arenas import ARENAS, BUDGETS
from curvescope.studies.optimisers.contenders import CONTENDERS
from curvescope.studies.optimisers.course import Course, run_course

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

TUNING = 0  # the seed of the trials, before those of the runs


@dataclass(frozen=True)
class Config(BaseConfig):
    """Who is compared, and where. The defaults take a few minutes on a CPU."""

    optimisers: tuple[str, ...] = setting(tuple(CONTENDERS), "of those that are known")
    arenas: tuple[str, ...] = setting(tuple(ARENAS), "addition, tiny-gpt")
    rates: tuple[float, ...] = setting(
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0), "learning rates that each of them tries"
    )
    seeds: int = setting(4, "runs with the best rate, after the trials on a seed of their own")
    budget: float = setting(1.0, "of a run, times 150 gradients on addition and 35 on tiny-gpt")
    looks: int = setting(13, "at the held-out loss in a run, the first before it")
    batch_size: int = setting(16, "sequences of a step")
    device: str = setting("cpu", "cpu, cuda, …")
    seed: int = setting(0, "of weights and batches")

    def __post_init__(self) -> None:
        as_tuples(self, "optimisers", "arenas", "rates")
        super().__post_init__()
        at_least(self, 2, "seeds", "looks")
        at_least(self, 1, "batch_size")
        for name, known in (("optimisers", CONTENDERS), ("arenas", ARENAS)):
            for value in getattr(self, name):
                if value not in known:
                    raise UsageError(f"{name}: unknown {value!r}", hint=near_misses(value, list(known)))
            if not getattr(self, name) or len(set(getattr(self, name))) < len(getattr(self, name)):
                raise UsageError(f"expected some {name}, each once, got {getattr(self, name)}")
        if not self.rates or not all(rate > 0 for rate in self.rates) or not self.budget > 0:
            raise UsageError("expected rates above 0 and a budget above 0")


@dataclass(frozen=True)
class Compared(Shown):
    """Trials and runs of every optimiser in every arena, by `arena/optimiser`."""

    arenas: list[str]
    optimisers: list[str]
    rates: list[float]
    seeds: int
    trials: dict[str, np.ndarray]  # (rates,) losses at the end of the budget
    courses: dict[str, list[Course]]  # one for each seed

    def of(self, arena: str, optimiser: str) -> list[Course]:
        """The runs with the best rate."""
        return self.courses[f"{arena}/{optimiser}"]

    def rate(self, arena: str, optimiser: str) -> float:
        """The best rate of the trials."""
        return self.of(arena, optimiser)[0].rate

    def at_edge(self, arena: str, optimiser: str) -> bool:
        """Whether it is the first or the last of the grid, so that a better one may lie beyond."""
        return self.rate(arena, optimiser) in (min(self.rates), max(self.rates))

    def claims(self) -> list[Claim]:
        """Who is ahead of AdamW, and where."""
        return claims.judge(self)

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Ends of runs, differences, trials, and every look."""
        return tables.frames(self)

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.studies.optimisers import figures

        return figures.draw(self)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Compared:
    """Tune every optimiser, then run it.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    pairs = [(arena, name) for arena in cfg.arenas for name in cfg.optimisers]
    pieces = [piece for arena, name in pairs for piece in _pieces(cfg, arena, name)]
    found = work_through(pieces, progress=progress, state=state)

    def courses(names: list[str]) -> list[Course]:
        return [found.take(Course, name) for name in names]

    return Compared(
        arenas=list(cfg.arenas),
        optimisers=list(cfg.optimisers),
        rates=list(cfg.rates),
        seeds=cfg.seeds,
        trials={f"{a}/{n}": np.array([c.final for c in courses(_trials(cfg, a, n))]) for a, n in pairs},
        courses={f"{a}/{n}": courses([_name(a, n, "seed", i) for i in range(cfg.seeds)]) for a, n in pairs},
    )


def _name(arena: str, optimiser: str, kind: str, number: int) -> str:
    return f"{arena}.{optimiser}.{kind}{number}"


def _trials(cfg: Config, arena: str, optimiser: str) -> list[str]:
    return [_name(arena, optimiser, "rate", i) for i in range(len(cfg.rates))]


def _pieces(cfg: Config, arena: str, optimiser: str) -> list[Piece]:
    """Trials, and the runs that need them."""
    course = partial(_course, cfg, arena, optimiser)
    trials = _trials(cfg, arena, optimiser)
    found = [
        Piece(name, partial(course, rate, TUNING), f"{optimiser} on {arena}, lr {rate:g}")
        for name, rate in zip(trials, cfg.rates, strict=True)
    ]
    for i in range(cfg.seeds):

        def work(*trials: Result, seed: int = TUNING + 1 + i) -> Course:
            return course(best(trials), seed)

        words = f"{optimiser} on {arena}, seed {i + 1}"
        found.append(Piece(_name(arena, optimiser, "seed", i), work, words, needs=tuple(trials)))
    return found


def _course(cfg: Config, arena: str, optimiser: str, rate: float, seed: int) -> Course:
    place = ARENAS[arena](1000 * cfg.seed + seed, cfg.batch_size, cfg.device)
    return run_course(place, optimiser, rate, seed, cfg.budget * BUDGETS[arena], cfg.looks)


def best(trials: tuple[Result, ...]) -> float:
    """The rate of the lowest loss; the smallest rate where all have diverged."""
    courses = [trial for trial in trials if isinstance(trial, Course)]
    assert len(courses) == len(trials)
    return min(courses, key=lambda course: (course.final, course.rate)).rate
