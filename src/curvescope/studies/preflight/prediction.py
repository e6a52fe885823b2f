"""What a study will take: time and memory by its steps, and what to do where it is too much.

A step of p products with c columns each, over n parameters, whose algorithm keeps a basis of m vectors for
each column, on D batches of which the first has t seconds for a vector:

    time    p (D t + n (m' / 2) row) + min(p n kept + files, max(1 s, a quarter of that)) + D building
    memory  base + D graph, of all operators so far + c (m + 3) n entries + passing

m' = min(m, p / c) is how far the basis grows. Graphs take at most half of what is free; where those of one
operator do not fit, they are built anew for every product, and that of one batch passes. AROUND is added
once: starting, checks, figures, tables, writing. On a CPU figures are the last stage, with FIGURES in the
place of vectors. The most that a run takes has MARGIN in it, since predictions are as far off (see
docs/howto/cost.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch

from curvescope.core.config import Config
from curvescope.core.numbers import DAY, data_size
from curvescope.engines.graph_cache import SHARE
from curvescope.models.model import Model
from curvescope.problem import Problem
from curvescope.runs.disk.journal import MOST_OF_TIME, PATIENCE
from curvescope.runs.study import Plan, Step, Study
from curvescope.studies import find
from curvescope.studies.preflight.measurements import Clock, Kind, Measured, Taken, measure
from curvescope.studies.setting import TASK, ModelOnData, make_problem

SAMPLED = 3  # of many operators of one kind, so many are measured
DRAWN = "figures"
KNOWN = ("hessian", "ggn", "functional", "sources", "source", "gradient", "loss")
Globs = tuple[str, ...]
AROUND = 8.0  # seconds of the processor: until a study is imported 2, checks 1, figures and files 3 to 5
FIGURES = 110 * 2**20  # bytes of the libraries that draw, and of what they draw
MARGIN = 1 / 0.7  # what was predicted was at most 30 % below what runs took
BUFFERS = 3  # vectors that an algorithm has besides its basis: what it multiplies, the product, a sum


class Stage(NamedTuple):
    """A step with what it takes."""

    what: str
    products: float
    seconds: float
    most: float  # seconds, where convergence decides
    vectors: int  # bytes
    graphs: int  # bytes that are kept when it ends
    memory: int  # bytes in all, at its peak
    columns: int = 1  # vectors that go at once


@final
@dataclass(frozen=True)
class Prediction:
    """What a study takes.

    Attributes:
        other: seconds of work that no model changes: starting, checks, figures, tables, writing.
        base: bytes before any product, weights among them.
        free: bytes that could be taken then.
        passing: bytes that pass while a product is taken, at most.
    """

    stages: tuple[Stage, ...]
    other: float
    base: int
    free: int
    passing: int

    @property
    def seconds(self) -> float:
        """Expected."""
        return sum(stage.seconds for stage in self.stages) + self.other

    @property
    def most(self) -> float:
        """If eigenvalues take all products that they may, and all takes MARGIN times as long."""
        return MARGIN * (sum(stage.most for stage in self.stages) + self.other)

    @property
    def largest(self) -> Stage:
        """The stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.memory)

    @property
    def memory(self) -> int:
        """Bytes at the peak."""
        return self.largest.memory

    @property
    def fits(self) -> bool:
        """Whether the peak is within what there is."""
        return self.memory <= self.base + self.free


def kinds_of(steps: Sequence[Step]) -> dict[Kind, int]:
    """What has to be measured and how often a study asks for it, what stands for most first.

    Of many operators a few are, from the first to the last. One of every name comes before one of every
    operator, and that before other numbers of columns, which are measured of single operators alone.
    """
    asked: dict[Kind, int] = {}
    several: set[Kind] = set()
    for step in steps:
        for space in sampled(step):
            kind, count = Kind(step.kind, space, step.columns), len(step.spaces)
            asked[kind] = max(asked.get(kind, 0), int(step.products / (count * step.columns)))
            several |= {kind} if count > 1 else set()
    wanted = [k for k in asked if k not in several or k.columns == 1 or k._replace(columns=1) not in asked]
    order = sorted(wanted, key=lambda kind: (kind.columns, KNOWN.index(kind.name)))
    names = {kind.name: kind for kind in reversed(order)}
    operators = {(kind.name, kind.space): kind for kind in reversed(order)}
    first = sorted(names.values(), key=order.index)
    return {kind: asked[kind] for kind in [*first, *sorted(operators.values(), key=order.index), *order]}


def predict(problem: Problem, steps: Sequence[Step], measured: Measured, other: float) -> Prediction:
    """Add up the steps in their order; `other` are seconds of work that no model changes."""
    state = _Standing(problem, measured)
    stages = [state.stage(step) for step in steps]
    if problem.device.type == "cpu":
        held = stages[-1].graphs if stages else 0
        stages.append(Stage(DRAWN, 0, 0.0, 0.0, 0, held, measured.base + held + FIGURES))
    passing = max(taken.passing for taken in measured.taken.values())
    return Prediction(tuple(stages), other + AROUND, measured.base, measured.free, passing)


class _Standing:
    """What is built already as the steps go on."""

    def __init__(self, problem: Problem, measured: Measured):
        self._problem, self._measured = problem, measured
        self._batches = problem.batches.num_sequences / problem.batches[0].num_sequences
        self._budget = int(SHARE * measured.free)
        self._graphs: dict[Any, float] = {}  # bytes, by operator
        self._known: set[tuple[str, Globs]] = set()  # operators that are there

    def stage(self, step: Step) -> Stage:
        """What a step takes."""
        taken = _mean([self._of(Kind(step.kind, space, step.columns)) for space in sampled(step)])
        fits = taken.graph <= self._budget
        new = self._keep(step, self._batches * taken.graph if fits else 0.0)
        sizes = [self._problem.space(*space).size for space in step.spaces]
        expected, most = (
            self._seconds(step, taken, products, sizes, new)
            for products in (step.products, max(step.most, step.products))
        )
        entry = torch.finfo(self._problem.dtype).bits // 8
        length = step.basis
        if self._problem.device.type == "cpu":  # memory that was never written to is not there
            length = min(length, int(step.products / (step.columns * len(sizes))) + 1)
        vectors = step.columns * (length + BUFFERS) * max(sizes) * entry
        graphs = int(min(sum(self._graphs.values()), self._budget))
        passing = taken.passing + (0 if fits else taken.graph)  # what is not kept passes
        memory = self._measured.base + graphs + vectors + passing
        return Stage(step.what, step.products, expected, most, vectors, graphs, memory, step.columns)

    def _keep(self, step: Step, size: float) -> int:
        """Note the graphs of a step, of so many bytes each; how many of its operators are new.

        Of operators that are made anew one is there at a time, in the place of those before; of those of
        other kinds none are left where a step is a piece of its own.
        """
        keys = {(step.kind, space) for space in step.spaces}
        if step.made:
            others = {} if step.alone else self._graphs
            self._graphs = {key: held for key, held in others.items() if key[0] != step.kind}
            self._graphs[step.kind, step.spaces[0]] = size
            self._known |= keys
            return step.made * len(keys)
        new = keys - self._known
        self._graphs |= dict.fromkeys(new, size)
        self._known |= keys
        return len(new)

    def _of(self, kind: Kind) -> Taken:
        """What a kind takes; what was not measured takes as much as what is most like it."""
        measured, n = self._measured.taken, self._problem.space(*kind.space).size

        def distance(other: Kind) -> tuple[bool, bool, float, int]:
            m = self._problem.space(*other.space).size
            differs = other.name != kind.name, other.space != kind.space
            return *differs, max(n, m) / min(n, m), abs(other.columns - kind.columns)

        return measured[min(measured, key=distance)]

    def _seconds(self, step: Step, taken: Taken, products: float, sizes: list[int], new: int) -> float:
        n, (row, kept, file) = sum(sizes) / len(sizes), self._measured.around
        length = min(step.basis, products / (step.columns * len(sizes)))
        each = self._batches * taken.seconds + n * length / 2 * row
        writing = products * n * kept + products / step.columns * file
        journal = min(writing, max(PATIENCE * len(sizes), MOST_OF_TIME * products * each))
        anew = self._batches * taken.graph > self._budget
        built = products / step.columns if anew else new
        return products * each + journal + built * self._batches * taken.building + new * taken.opening


def sampled(step: Step) -> list[Globs]:
    """All spaces of a step, or of many a few that lie evenly."""
    count = len(step.spaces)
    if count <= SAMPLED:
        return list(step.spaces)
    return [step.spaces[int((i + 0.5) * count / SAMPLED)] for i in range(SAMPLED)]


def _mean(found: Sequence[Taken]) -> Taken:
    """The mean, and of what passes the most."""
    count = len(found)
    return Taken(
        sum(t.seconds for t in found) / count,
        sum(t.building for t in found) / count,
        sum(t.graph for t in found) // count,
        max(t.passing for t in found),
        sum(t.opening for t in found) / count,
    )


# --------------------------------------------------------------------------------------------------- forecast


@final
@dataclass(frozen=True)
class Forecast:
    """What a study will take on a problem, and what that was measured on.

    Attributes:
        stepwise: whether the study says its steps; if not, it is the most that it may take.
    """

    study: str
    cfg: ModelOnData
    problem: Problem
    measured: Measured
    prediction: Prediction
    stepwise: bool


def forecast(
    name: str,
    study: Study[Config],
    cfg: Config,
    *,
    clock: Clock = time.perf_counter,
    model: Model | None = None,
) -> Forecast | None:
    """Measure a few products, and add up; None where the study says nothing of what it takes.

    Args:
        clock: what seconds are measured by.
        model: that of the configuration, where it is loaded already.
    """
    if study.plan is None or not isinstance(cfg, ModelOnData):
        return None
    problem = make_problem(cfg, model)
    plan = study.plan
    steps = steps_of(plan, cfg, problem)
    measured = measure(problem, cfg, kinds_of(steps), clock)
    seconds = plan.cost(cfg, problem).seconds
    prediction = predict(problem, steps, measured, seconds)
    return Forecast(name, cfg, problem, measured, prediction, plan.steps is not None)


def steps_of(plan: Plan[Config], cfg: Config, problem: Problem) -> list[Step]:
    """The steps of a plan; of one without, all products as one."""
    if plan.steps is not None:
        return plan.steps(cfg, problem)
    products = plan.cost(cfg, problem).products
    return [Step("products", "hessian", products, most=products, spaces=(plan.blocks(cfg),))]


# ----------------------------------------------------------------------------------------------------- advice

AGAIN = 2  # layers whose results are there at once where they are computed again
LENGTHS = {
    "eigenvalues": ("num_steps",), "parts of the data": ("part_steps",), "ceilings": ("block_steps",),
    "ends": ("num_sharp_steps",), "": ("num_density_steps", "num_steps", "num_sharp_steps"),
}  # fmt: skip
"""By how a stage is called, the settings that say how many vectors it keeps, as studies call them."""
COUNTS = ("num_probes", "num_density_probes", "num_trace_probes", "num_steps", "num_density_steps")
"""Settings that products are proportional to, as studies call them."""


def advice(found: Forecast) -> list[str]:
    """Lines on what would fit, one where all does; and on what takes less time where it takes over a day."""
    return [*_memory(found), *_time(found)]


def _time(found: Forecast) -> list[str]:
    """Products grow as probes and steps do, and one as the tokens do."""
    if found.prediction.seconds <= DAY:
        return []
    names = found.cfg.to_dict()
    counts = [f"{name} ({names[name]})" for name in COUNTS if names.get(name)]
    fewer = f"fewer tokens ({found.cfg.tokens:,})"
    if found.cfg.data.startswith(TASK):
        fewer = "a smaller task"
    fewer += f", smaller {', '.join(counts)}" if counts else ""
    card = "; --device cuda, if there is one" if found.problem.device.type == "cpu" else ""
    return [
        f"it takes over a day. What would help: {fewer}: time falls as each of them does; --budget 1h "
        f"chooses those that are not given{card}"
    ]


def _memory(found: Forecast) -> list[str]:
    p = found.prediction
    if p.fits:
        return [f"it fits: {data_size(p.base + p.free - p.memory)} are left"]
    top = p.largest
    passing = top.memory - p.base - top.graphs - top.vectors
    lines = [f"it does not fit: {data_size(p.memory - p.base - p.free)} are missing. What would help:"]
    lines += _smaller_batch(found, passing, p.free - top.vectors)
    lines += _computed_again(found, passing)
    lines += _fewer_vectors(found, p.free - passing)
    lines += _fewer_blocks(found, p.free - passing)
    return lines + _ranks(found, passing)


def _smaller_batch(found: Forecast, passing: int, room: int) -> list[str]:
    """Results of layers grow as a batch does."""
    now = found.problem.batches[0].num_sequences
    fitting = int(now * room / max(passing, 1))
    if not 1 <= fitting < now:
        return []
    return [
        f"  batch: --set batch_size={fitting}, not {now}: a product passes {data_size(passing)} through "
        "memory, and that falls as the batch does; no number changes beyond rounding"
    ]


def _computed_again(found: Forecast, passing: int) -> list[str]:
    depth = found.problem.model.facts.get("n_layers")
    if found.cfg.checkpoint or not isinstance(depth, int) or depth <= AGAIN:
        return []
    less = data_size(AGAIN * passing // depth)
    return [
        f"  checkpoint: --set checkpoint=true: layers are computed again, about {less} in the place of "
        f"{data_size(passing)}, two to three times the time"
    ]


def _fewer_vectors(found: Forecast, room: int) -> list[str]:
    """Where an algorithm's basis is the larger part; eigenvalues take what memory they may, whatever is set.

    Fewer probes help where several go at once.
    """
    top, names = found.prediction.largest, found.cfg.to_dict()
    column, buffers = _column(found), BUFFERS * top.columns
    fitting, now = room // column - buffers, top.vectors // column - buffers
    known = next(those for start, those in LENGTHS.items() if top.what.startswith(start))
    setting = next((name for name in known if name in names), None)
    if setting is None or top.most > top.seconds or not 2 <= fitting < now:
        return []
    return [
        f"  vectors: {top.what} keeps {now} of {data_size(column)} each, {fitting} would fit: a smaller "
        f"{setting}{', or fewer probes' if top.columns > 1 else ''}"
    ]


def _fewer_blocks(found: Forecast, room: int) -> list[str]:
    top, size = found.prediction.largest, found.problem.space().size
    if "blocks" not in found.cfg.to_dict() or top.vectors <= room or room <= 0:
        return []
    most = int(size * room / top.vectors)
    return [f"  blocks: --blocks 'L0.*', say: vectors over at most {most:,} of {size:,} parameters fit"]


def _ranks(found: Forecast, passing: int) -> list[str]:
    """Parameters and vectors are cut over ranks; what passes through a layer is not."""
    p = found.prediction
    room = p.base + p.free - passing
    if room <= 0:
        return ["  ranks: none are enough while one product does not fit: the batch first"]
    count = math.ceil((p.base + p.largest.vectors) / room)
    if count < 2:
        return []
    if not find(found.study).on_pieces:
        return []
    return [
        f"  ranks: torchrun --nproc-per-node {count} -m curvescope … --parallel shards: parameters and "
        f"vectors in {count} parts"
    ]


def _column(found: Forecast) -> int:
    """Bytes of a vector over all that varies."""
    return found.problem.space().size * torch.finfo(found.problem.dtype).bits // 8
