"""Settings that fit into a time budget: chosen from one timed product, and again during the run.

Only settings that the user did not give are chosen, and never above the study's defaults. They are lowered
in this order: the rungs of the study's ladder (probes, steps, blocks, maps), then tokens, down to the
minimum number of sequences for its verdicts. If that is too slow for a budget, the study measures a
selection of its numbers.

An estimate is the number of products times the seconds of one, which are proportional to the tokens; slow
products are timed on the first tokens of a sequence. A budget uses wall-clock time, and the rest is planned
again before every piece of work: finished pieces show how much slower or faster the machine is than
estimated. Without a budget, a CPU is timed by thread time, so the choice does not depend on other
processes. If the model is sharded, the ranks time products together and use the slowest time.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, final

from curvescope.algorithms.vectors import columns_of
from curvescope.core.config import Config, Settings, Value
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.number_format import duration, short_duration
from curvescope.core.seeds import probes
from curvescope.models.model import Model
from curvescope.models.zoo import BUNDLED
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.runs.folder import RunFolder
from curvescope.runs.resumable_loop import Pace, Piece, Planned, State
from curvescope.runs.study import Plan, Study
from curvescope.studies.common.planning import Cost, costs
from curvescope.studies.preflight.measurements import cuts, part, shortest, whole, work
from curvescope.studies.problem_config import TASK, ModelOnData, make_problem

QUICK, USUAL = 60.0, 180.0  # seconds
OWN = 14e-9  # CPU seconds of an algorithm and its journal, per entry of a product
FIRST = 2  # cost of building a graph for another operator, in products
TIMED = 4  # timed products; the first one checks and builds
LITTLE = 0.1  # faster products (in seconds) are timed again on all tokens
MANY = 2**32  # parameters times tokens: about a second for a product
PATIENCE = 3.0  # approximate seconds for timing such products
BUSY = 1.5  # ratio of wall-clock to thread time that counts as a busy machine
ENDING = 5.0  # seconds for figures, tables and files after the last product
OVERRUN = 1.2  # a study does not start if its smallest settings exceed the budget by this factor
PRIOR = 0.02  # share of the budget: weight of the estimate against measured times
UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


class Fitted(NamedTuple):
    """Chosen settings, with a message."""

    cfg: Config
    words: str  # message: time, and chosen settings
    seconds: float = 0.0  # maximum time
    choice: str = ""  # message: chosen settings only
    model: Model | None = None  # model used for timing
    budget: Budget | None = None  # budget that limits the run


def seconds_of(budget: str) -> float:
    """Convert `90s`, `3min` or `1.5h` to seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]*)\s*", budget.lower())
    if match is None or match[2] not in UNITS or float(match[1]) == 0:
        bare = match is not None and not match[2]
        raise UsageError(
            f"expected a budget such as 90s, 3min or 1h, got {budget!r}",
            hint=f"add a unit: {match[1]}s or {match[1]}min" if match is not None and bare else None,
        )
    return float(match[1]) * UNITS[match[2]]


def limit_of(cfg: Config, profile: str | None, budget: str | None) -> float | None:
    """Time limit of a study in seconds; None: no limit.

    The profile quick is a minute, full has no limit. The default is three minutes, except for bundled
    models, whose default numbers are the same on all machines.
    """
    if profile is not None and budget is not None:
        raise UsageError("expected --profile or --budget, got both", hint="a budget chooses the settings")
    if profile not in (None, "quick", "full"):
        raise UsageError(f"expected the profile quick or full, got {profile!r}")
    if budget is not None:
        return seconds_of(budget)
    if profile is not None:
        return QUICK if profile == "quick" else None
    bundled = isinstance(cfg, ModelOnData) and cfg.model in BUNDLED
    return None if bundled else USUAL


def fit(
    study: Study[Config],
    given: Settings,
    seconds: float | None,
    *,
    start: Settings | None = None,
    kept: bool = False,
    begun: float | None = None,
) -> Fitted:
    """Return the given settings, and choose the others so that the study takes at most `seconds`.

    Args:
        start: initial settings instead of the defaults.
        kept: the limit is wall-clock time, and a selection of numbers is better than a longer run.
        begun: `time.monotonic()` at the start of the budget; by default now.
    """
    begun = time.monotonic() if begun is None else begun
    cfg = study.Config.from_dict({**(start or {}), **given})
    if study.plan is None or not isinstance(cfg, ModelOnData):
        return Fitted(cfg, "")
    plan, timer = study.plan, Timer(cfg, study.plan)
    if seconds is None:
        only = timer.estimate(cfg)
        return Fitted(cfg, _words(only, timer.slowed), only.total, "", timer.model)
    levels = levels_of(plan, cfg, given, selections=kept)
    estimates = [timer.estimate(level.cfg) for level in levels]
    if kept:
        around = time.monotonic() - begun + ENDING * max(timer.slowed, 1.0)
        takes = [timer.slowed * estimate.expected + around for estimate in estimates]
    else:
        takes = [estimate.total for estimate in estimates]
    at = next((i for i, taken in enumerate(takes) if taken <= seconds), len(levels) - 1)
    full = takes[max(i for i, level in enumerate(levels) if not level.words)]
    if kept:
        _check(levels[-1], takes[-1], full, seconds, load=max(timer.slowed, 1.0))
    chosen = estimates[at]
    choice = _choice(cfg, levels[at], full, seconds)
    if not kept and takes[at] > seconds:
        missed = f"{duration(seconds)} is too short for this study; these are the smallest settings"
        choice = "; ".join(filter(None, [choice, missed]))
    words = "; ".join(filter(None, [_words(chosen, timer.slowed), choice]))
    budget = Budget(plan, chosen.cfg, given, seconds, begun=begun, timer=timer) if kept else None
    return Fitted(chosen.cfg, words, chosen.total, choice, timer.model, budget)


class Level(NamedTuple):
    """Settings cheaper than those of the previous level; `words` describes a selection."""

    cfg: ModelOnData
    words: str = ""


def levels_of(plan: Plan[Any], cfg: ModelOnData, given: Settings, *, selections: bool) -> list[Level]:
    """Return the configuration and its lower levels: rungs, tokens, selections."""
    levels = [Level(cfg), *(Level(_lowered(cfg, rung, given)) for rung in plan.ladder)]
    last, least = levels[-1].cfg, plan.sequences * cfg.seq_len
    while "tokens" not in given and last.tokens > least:
        last = replace(last, tokens=max(last.tokens // 2, least))
        levels.append(Level(last))
    if selections:
        levels += [Level(_lowered(last, part.settings, given), part.words) for part in plan.selections]
    return list({level.cfg: level for level in reversed(levels)}.values())[::-1]


def _check(least: Level, seconds: float, full: float, limit: float, *, load: float) -> None:
    """Raise if even the lowest level takes much longer than the limit on an idle machine.

    On a busy machine the study measures the lowest level, and takes longer.

    Args:
        seconds: time of the lowest level at the current load of the machine. `full` is the time of the
            smallest settings with all numbers.
        load: times that the machine is slower than an idle one.
    """
    if seconds <= OVERRUN * limit * load:
        return
    what = least.words or "the smallest settings"
    raise CurvescopeError(
        f"{duration(limit)} is too short for this study: {what} would take {duration(seconds)}, and the "
        f"smallest settings with all numbers {duration(full)}",
        hint=f"--budget {math.ceil(seconds)}s",
    )


class TimeEstimate(NamedTuple):
    """Estimated cost and time of a configuration."""

    cfg: ModelOnData
    cost: Cost
    seconds: float  # seconds of one product
    own: float  # seconds of the algorithm for each product
    other: float  # seconds of work that does not depend on the model

    @property
    def total(self) -> float:
        """Maximum seconds: all products, their graphs, the algorithms, and other work."""
        return seconds_for(self.cost._replace(products=self.cost.most), self.seconds, self.own) + self.other

    @property
    def expected(self) -> float:
        """Expected seconds: like `total`, with the expected number of products."""
        return seconds_for(self.cost, self.seconds, self.own) + self.other


def seconds_for(cost: Cost, each: float, own: float) -> float:
    """Seconds of expected products and the graphs before them."""
    return (cost.products + FIRST * cost.graphs) * each + cost.products * own


class Timer:
    """Time of a product, measured on a single sequence; quick products are timed on all tokens."""

    def __init__(self, cfg: ModelOnData, plan: Plan[Config]):
        self._cfg, self._plan = cfg, plan
        self._tokens = min(cfg.tokens, cfg.seq_len)
        self._problem = make_problem(replace(cfg, tokens=self._tokens))
        self.model = self._problem.model
        size = self._problem.space(*plan.blocks(cfg)).size
        self.own = OWN * size if self._problem.device.type == "cpu" else 0.0
        self.slowed = 1.0  # ratio of wall-clock to thread time
        self._seconds = self._timed()
        if self._seconds < LITTLE and cfg.tokens > self._tokens:
            self._tokens, self._problem = cfg.tokens, make_problem(cfg, self.model)
            self._seconds = self._timed()

    def _timed(self) -> float:
        """Seconds of a product; a slow one is timed on as many of the first tokens as are quick."""
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
        """Mean time of products after the first, as in an algorithm; a single product if it is slow.

        This is wall-clock time on a GPU, or if ranks wait for each other; otherwise it is the time of the
        calling thread, which takes part in all work.
        """
        blocks = self._plan.blocks(self._cfg)
        H = Hessian(problem, *blocks, engine=self._cfg.engine, checkpoint=self._cfg.checkpoint)  # pyright: ignore[reportArgumentType]
        kind, spread = {"dtype": H.dtype, "device": H.device}, problem.model.spread
        v = probes(H.shape[1], 1, seed=0, shard=columns_of(H), **kind)[:, 0]
        by_thread = H.device.type == "cpu" and spread is None
        clock = time.thread_time if by_thread else time.monotonic
        with H.frozen():  # as in an algorithm
            (H @ v).sum().item()  # .item() waits for the GPU
            start, begun, count = clock(), time.monotonic(), 0
            while count < TIMED - 1 and (spread or not count or clock() - start < PATIENCE / TIMED):
                (H @ v).sum().item()
                count += 1
            taken, passed = clock() - start, time.monotonic() - begun
        self.slowed = passed / max(taken, 1e-9)
        each = taken / count
        return each if spread is None else spread.max(each, H.device)

    def seconds(self, cfg: ModelOnData) -> float:
        """Seconds of one product; a task uses all its data for any number of tokens."""
        return self._seconds * (1.0 if cfg.data.startswith(TASK) else cfg.tokens / self._tokens)

    def estimate(self, cfg: ModelOnData) -> TimeEstimate:
        """Estimate the time of a configuration."""
        plan = self._plan
        each = costs(plan.steps(cfg, self._problem), self._problem, plan.blocks(cfg))
        cost = sum(each, Cost(0.0, 0.0, 0.0))
        return TimeEstimate(cfg, cost, self.seconds(cfg), self.own, plan.seconds(cfg))


class Left(NamedTuple):
    """Estimated remaining time of a run at some settings."""

    seconds: float  # seconds, if the current piece takes its maximum number of products
    piece: float  # seconds of the current piece, with the expected number of products


@final
class Budget(Pace):
    """Time budget of a run: the rest is planned again before every piece.

    Args:
        plan: plan of the study.
        cfg: configuration of the run.
        given: settings that the user gave; these do not change.
        seconds: the budget in seconds.
        begun: start of the budget on `clock`.
        timer: timer of the configuration; by default, a product is timed when the run begins.
    """

    def __init__(
        self,
        plan: Plan[Any],
        cfg: Config,
        given: Settings,
        seconds: float,
        *,
        begun: float,
        timer: Timer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        assert isinstance(cfg, ModelOnData)
        self.cfg, self._plan, self._timer, self._clock = cfg, plan, timer, clock
        self.seconds, self._end = seconds, begun + seconds - ENDING
        levels = levels_of(plan, cfg, {**given, "tokens": cfg.tokens}, selections=True)
        self._levels = [level.cfg for level in levels]
        self._spent = self._reckoned = PRIOR * seconds
        self._hand: tuple[str, float, float] | None = None  # current piece, its start, its estimate
        self._known: dict[Config, tuple[list[tuple[str, ...]], list[Cost], list[Piece]]] = {}
        self._reported: dict[str, Value] = {}

    @property
    def pace(self) -> float:
        """Ratio of measured to estimated time of the pieces."""
        return self._spent / self._reckoned

    def pieces(self, planned: Planned, done: Collection[str], state: State | None) -> Sequence[Piece]:
        """Return the pieces of the first level that fits into the time, or of the last level."""
        if planned.cfg != self.cfg:
            return planned.pieces(planned.cfg)
        now = self._clock()
        self._learn(done, now)
        timer = self._timer = self._timer or Timer(self.cfg, self._plan)
        left = (
            self._end - now - ENDING * max(timer.slowed - 1.0, 0.0)
        )  # a busy machine also draws figures more slowly
        cfg = self._levels[-1]
        for cfg in self._levels:
            if self.pace * self._left(planned, cfg, done).seconds <= left:
                break
        self._report(cfg, state)
        pieces = self._of(planned, cfg)[2]
        hand = next((piece.name for piece in pieces if piece.name not in done), None)
        self._hand = None if hand is None else (hand, now, self._left(planned, cfg, done).piece)
        return pieces

    def _learn(self, done: Collection[str], now: float) -> None:
        """Compare the time of the previous piece with its estimate."""
        if self._hand is not None and self._hand[0] in done:
            _, start, reckoned = self._hand
            self._spent += now - start
            self._reckoned += reckoned

    def _left(self, planned: Planned, cfg: ModelOnData, done: Collection[str]) -> Left:
        timer = self._timer = self._timer or Timer(self.cfg, self._plan)
        names, each, pieces = self._of(planned, cfg)
        todo = [piece.name for piece in pieces if piece.name not in done]
        rest = hand = Cost(0.0, 0.0, 0.0)
        for owners, cost in zip(names, each, strict=True):
            open_ = sum(name not in done for name in owners)
            rest += cost * (open_ / max(len(owners), 1))
            hand += cost * ((todo[0] in owners) / len(owners)) if todo and owners else Cost(0.0, 0.0, 0.0)
        rates = timer.slowed * timer.seconds(cfg), timer.own
        more = Cost(hand.most - hand.products, 0.0, 0.0)
        other = self._plan.seconds(cfg) * len(todo) / max(len(pieces), 1)
        return Left(seconds_for(rest, *rates) + seconds_for(more, *rates) + other, seconds_for(hand, *rates))

    def _of(
        self, planned: Planned, cfg: ModelOnData
    ) -> tuple[list[tuple[str, ...]], list[Cost], list[Piece]]:
        """Return the pieces of every step, the cost of every step, and all pieces."""
        if cfg not in self._known:
            steps, pieces = self._plan.steps(cfg, planned.problem), list(planned.pieces(cfg))
            names = [
                tuple(p.name for p in pieces if any(fnmatchcase(p.name, glob) for glob in step.pieces))
                for step in steps
            ]
            self._known[cfg] = names, costs(steps, planned.problem, self._plan.blocks(cfg)), pieces
        return self._known[cfg]

    def _report(self, cfg: ModelOnData, state: State | None) -> None:
        """Report settings that are lower than before, and store them."""
        own = self.cfg.to_dict() | self._reported
        lower = {
            name: value
            for name, value in cfg.to_dict().items()
            if value != own[name] and _less(value, own[name])
        }
        if lower and isinstance(state, RunFolder):
            words = ", ".join(f"{name}={_shown(value)}" for name, value in lower.items())
            state.tell(f"settings lowered to {words} to finish within {duration(self.seconds)}")
            state.lowered(lower)
        self._reported |= lower


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _lowered(cfg: ModelOnData, rung: Settings, given: Settings) -> ModelOnData:
    """Lower the settings to those of a rung, unless the user gave them or they are already lower."""
    own = cfg.to_dict()
    return replace(cfg, **{k: v for k, v in rung.items() if k not in given and _less(v, own[k])})


def _less(new: object, own: object) -> bool:
    """Return True if a number is smaller, or a list has only some of the entries."""
    if isinstance(new, list | tuple) and isinstance(own, list | tuple):
        return len(new) < len(own) and set(new) < set(own)
    return isinstance(new, int) and isinstance(own, int) and new < own


def _words(chosen: TimeEstimate, slowed: float) -> str:
    """Describe the time and its components."""
    cost = chosen.cost
    around = f" and {short_duration(chosen.own)} around each" if chosen.own > 0.1 * chosen.seconds else ""
    made = f"{cost.most:.0f} products of {short_duration(chosen.seconds)}{around}"
    made += f", and {duration(chosen.other)} independent of the model" if chosen.other else ""
    line = f"up to about {duration(chosen.total)}: {made}"
    if slowed > BUSY:
        line += f"; about {duration(slowed * chosen.total)} at the current load of the machine"
    return line


def _choice(cfg: Config, level: Level, full: float, seconds: float) -> str:
    """Describe the chosen settings and the omitted numbers.

    Args:
        full: seconds of the smallest settings with all numbers.
    """
    before, now = cfg.to_dict(), level.cfg.to_dict()
    other = ", ".join(f"{name}={_shown(value)}" for name, value in now.items() if value != before[name])
    if level.words:
        return (
            f"{duration(seconds)} is too short for all numbers, which take at least {duration(full)}; "
            f"measuring only {level.words} ({other})"
        )
    return (
        f"chosen for {duration(seconds)}: {other} (--profile full for the study's defaults)" if other else ""
    )
