"""Settings that fit the machine: from one timed product, how long a study takes, and what is in time.

Only settings that nobody gave are chosen, and never above the study's own: the first rung of its ladder whose
estimate is in time, or the last one. An estimate is the most products that can be needed times the seconds
of one, which grow as the tokens do; a slow one is timed on the first tokens of a sequence. On a CPU these are
seconds of the thread that computes, so that what is chosen does not depend on what else the machine does; a
machine that is busy takes longer, and that is said. Ranks that a model is spread over time products together,
and all take what the slowest one found.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import NamedTuple

from curvescope.algorithms.vectors import columns_of
from curvescope.core.config import Config, Settings, Value
from curvescope.core.errors import UsageError
from curvescope.core.numbers import duration, short_duration
from curvescope.core.seeds import probes
from curvescope.models.model import Model
from curvescope.models.zoo import BUNDLED
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.runs.study import Cost, Plan, Study
from curvescope.studies.preflight.measurements import cuts, part, shortest, whole, work
from curvescope.studies.setting import TASK, ModelOnData, make_problem

QUICK, USUAL = 60.0, 180.0  # seconds
OWN = 14e-9  # seconds that an algorithm takes for each entry of a product, and its journal, on a CPU
FIRST = 2  # products that building a graph for another operator takes
TIMED = 4  # products, the first of which checks and builds
LITTLE = 0.1  # seconds of a product that is timed again, on all tokens
MANY = 2**32  # parameters times tokens: about a second for a product
PATIENCE = 3.0  # seconds for such products, about
BUSY = 1.5  # times that a product takes as long as its thread computes
UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


class Fitted(NamedTuple):
    """Settings, and what to say about them."""

    cfg: Config
    words: str  # how long it takes, and what was chosen
    seconds: float = 0.0  # that it takes at most
    choice: str = ""  # what was chosen, alone
    model: Model | None = None  # that it was timed with


def seconds_of(budget: str) -> float:
    """`90s`, `3min`, `1.5h` in seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", budget.lower())
    if found is None or found[2] not in UNITS or float(found[1]) == 0:
        bare = found is not None and not found[2]
        raise UsageError(
            f"expected a budget such as 90s, 3min or 1h, got {budget!r}",
            hint=f"add a unit: {found[1]}s or {found[1]}min" if found is not None and bare else None,
        )
    return float(found[1]) * UNITS[found[2]]


def limit_of(cfg: Config, profile: str | None, budget: str | None) -> float | None:
    """Seconds that the study may take; None: as many as it does.

    The profile quick is a minute, full no limit. Without either three minutes, except for a bundled model:
    its numbers by default are the same everywhere.
    """
    if profile is not None and budget is not None:
        raise UsageError("expected --profile or --budget, got both", hint="a budget chooses by itself")
    if profile not in (None, "quick", "full"):
        raise UsageError(f"expected the profile quick or full, got {profile!r}")
    if budget is not None:
        return seconds_of(budget)
    if profile is not None:
        return QUICK if profile == "quick" else None
    bundled = isinstance(cfg, ModelOnData) and cfg.model in BUNDLED
    return None if bundled else USUAL


def fit(
    study: Study[Config], given: Settings, seconds: float | None, *, start: Settings | None = None
) -> Fitted:
    """The configuration with what was given, and the rest chosen to be done in `seconds`.

    Args:
        start: settings to begin with in the place of the study's own.
    """
    cfg = study.Config.from_dict({**(start or {}), **given})
    if study.plan is None or not isinstance(cfg, ModelOnData):
        return Fitted(cfg, "")
    plan, timer = study.plan, Timer(cfg, study.plan)
    rungs = [] if seconds is None else [_lowered(cfg, rung, given) for rung in plan.ladder]
    candidates = dict.fromkeys([cfg, *rungs])
    estimates = [Estimate(one, timer.cost(one), timer.seconds(one), timer.own) for one in candidates]
    chosen = next((e for e in estimates if seconds is None or e.total <= seconds), estimates[-1])
    choice = _choice(cfg, chosen, seconds)
    said = "; ".join(filter(None, [_words(chosen, timer.slowed), choice]))
    return Fitted(chosen.cfg, said, chosen.total, choice, timer.model)


class Estimate(NamedTuple):
    """What a configuration takes."""

    cfg: ModelOnData
    cost: Cost
    seconds: float  # of one product
    own: float  # of an algorithm, for each product

    @property
    def total(self) -> float:
        """Seconds of all products, of the graphs before them, of the algorithms around them, of the rest."""
        pieces, products, graphs, seconds = self.cost
        built = FIRST * (pieces if graphs is None else graphs)
        return (products + built) * self.seconds + products * self.own + seconds


class Timer:
    """How long a product takes, from one on a single sequence; a quick one is timed on all tokens."""

    def __init__(self, cfg: ModelOnData, plan: Plan[Config]):
        self._cfg, self._plan = cfg, plan
        self._tokens = min(cfg.tokens, cfg.seq_len)
        self._problem = make_problem(replace(cfg, tokens=self._tokens))
        self.model = self._problem.model
        size = self._problem.space(*plan.blocks(cfg)).size
        self.own = OWN * size if self._problem.device.type == "cpu" else 0.0
        self.slowed = 1.0  # how many times longer a product takes than its thread computes
        self._seconds = self._timed()
        if self._seconds < LITTLE and cfg.tokens > self._tokens:
            self._tokens, self._problem = cfg.tokens, make_problem(cfg, self.model)
            self._seconds = self._timed()

    def _timed(self) -> float:
        """Of a product; a slow one is timed on as many of the first tokens as are quick."""
        problem = self._problem
        if problem.model.num_parameters * self._tokens < MANY or problem.device.type != "cpu":
            return self._mean(problem)
        everything = whole(problem)
        least = shortest(everything)
        each = self._mean(part(problem, least)) / work(problem, least)
        quick = (cut for cut in cuts(everything) if TIMED * each * work(problem, cut) < PATIENCE)
        cut = next(quick, least)
        if cut != least:
            each = self._mean(part(problem, cut)) / work(problem, cut)
        return each * work(problem, everything) * problem.batches.num_sequences / everything.sequences

    def _mean(self, problem: Problem) -> float:
        """The mean over products after the first, as they are in an algorithm; one of them if it is slow.

        On a GPU the time that passes, on a CPU that of the calling thread, which takes part in all work; and
        again what passes where ranks wait for each other.
        """
        blocks = self._plan.blocks(self._cfg)
        H = Hessian(problem, *blocks, engine=self._cfg.engine, checkpoint=self._cfg.checkpoint)  # pyright: ignore[reportArgumentType]
        kind, spread = {"dtype": H.dtype, "device": H.device}, problem.model.spread
        v = probes(H.shape[1], 1, seed=0, pieces=columns_of(H), **kind)[:, 0]
        by_thread = H.device.type == "cpu" and spread is None
        clock = time.thread_time if by_thread else time.monotonic
        with H.frozen():  # as in an algorithm
            (H @ v).sum().item()  # so that a GPU has done it
            start, begun, count = clock(), time.monotonic(), 0
            while count < TIMED - 1 and (spread or not count or clock() - start < PATIENCE / TIMED):
                (H @ v).sum().item()
                count += 1
            taken, passed = clock() - start, time.monotonic() - begun
        self.slowed = passed / max(taken, 1e-9)
        each = taken / count
        return each if spread is None else spread.largest(each, H.device)

    def seconds(self, cfg: ModelOnData) -> float:
        """Of one product; a task has all its data whatever the tokens are."""
        return self._seconds * (1.0 if cfg.data.startswith(TASK) else cfg.tokens / self._tokens)

    def cost(self, cfg: ModelOnData) -> Cost:
        """Pieces and products of a configuration."""
        return self._plan.cost(cfg, self._problem)


def _lowered(cfg: ModelOnData, rung: Settings, given: Settings) -> ModelOnData:
    """The configuration with the settings of a rung that are below its own and that nobody gave."""
    own = cfg.to_dict()
    return replace(cfg, **{k: v for k, v in rung.items() if k not in given and _less(v, own[k])})


def _less(new: Value, own: Value) -> bool:
    return isinstance(new, int) and isinstance(own, int) and new < own


def _words(chosen: Estimate, slowed: float) -> str:
    """How long, and what it is made of."""
    cost = chosen.cost
    around = f" and {short_duration(chosen.own)} around each" if chosen.own > 0.1 * chosen.seconds else ""
    made = f"{cost.pieces} pieces, {cost.products:.0f} products of {short_duration(chosen.seconds)}{around}"
    made += f", and {duration(cost.seconds)} that no model changes" if cost.seconds else ""
    line = f"up to about {duration(chosen.total)}: {made}"
    if slowed > BUSY:
        line += f"; the machine is busy, which makes it about {duration(slowed * chosen.total)}"
    return line


def _choice(cfg: Config, chosen: Estimate, seconds: float | None) -> str:
    """What was chosen, and whether that is in time."""
    if seconds is None:
        return ""
    before, said = cfg.to_dict(), []
    other = [f"{name}={value}" for name, value in chosen.cfg.to_dict().items() if value != before[name]]
    if other:
        said.append(
            f"chosen for {duration(seconds)}: {', '.join(other)} (--profile full for the study's own)"
        )
    if chosen.total > seconds:
        said.append(f"no settings of this study are done in {duration(seconds)}, these are the smallest")
    return "; ".join(said)
