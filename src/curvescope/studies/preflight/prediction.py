"""Predict a study's time and memory from its steps, and advise what to change if they are too large.

A step makes p products with c columns each, over n parameters. Its algorithm keeps a basis of m vectors per
column. There are D batches, and the first takes t seconds per vector. Then

    time    p (D t + n (m' / 2) row) + min(p n kept + files, max(1 s, a quarter of that)) + D building
    memory  base + D graph, of all operators so far + c (m + 3) n entries + passing

m' = min(m, p / c) is the final size of the basis. Graphs take at most half of the free memory. If the graphs
of one operator do not fit, they are rebuilt for every product, one batch at a time. AROUND is added
once: starting, checks, figures, tables, writing. On a CPU figures are the last stage, with FIGURES taking the
place of vectors. The upper limit of the time includes MARGIN, the largest error of past predictions (see
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
from curvescope.core.number_format import DAY, data_size
from curvescope.engines.graph_cache import SHARE
from curvescope.models.model import Model
from curvescope.problem import Problem
from curvescope.runs.disk.journal import MOST_OF_TIME, PATIENCE
from curvescope.runs.study import Step, Study
from curvescope.studies import find
from curvescope.studies.preflight.measurements import (
    Clock,
    ProductCost,
    ProductKind,
    ProductMeasurements,
    measure,
)
from curvescope.studies.problem_config import TASK, ModelOnData, make_problem

SAMPLED = 3  # operators that are measured if there are many of one kind
DRAWN = "figures"
KNOWN = ("hessian", "ggn", "functional", "sources", "source", "gradient", "loss")
Globs = tuple[str, ...]
AROUND = 8.0  # processor seconds: importing a study 2, checks 1, figures and files 3 to 5
FIGURES = 110 * 2**20  # bytes of the plotting libraries and of the figures
MARGIN = 1 / 0.7  # predictions were at most 30 % below the measured times
BUFFERS = 3  # vectors of an algorithm besides its basis: input, product and a sum


class Stage(NamedTuple):
    """A step of a study with its predicted cost."""

    what: str
    products: float
    seconds: float
    most: float  # seconds if eigenvalues need all allowed products
    vectors: int  # bytes
    graphs: int  # bytes that stay allocated when the step ends
    memory: int  # total bytes at the peak of the step
    columns: int = 1  # vectors multiplied at once


@final
@dataclass(frozen=True)
class CostPrediction:
    """Predicted cost of a study.

    Attributes:
        other: seconds that do not depend on the model: starting, checks, figures, tables, writing.
        base: bytes in use before any product, including the weights.
        free: bytes that were free then.
        passing: most bytes that are allocated temporarily during a product.
    """

    stages: tuple[Stage, ...]
    other: float
    base: int
    free: int
    passing: int

    @property
    def seconds(self) -> float:
        """Expected seconds."""
        return sum(stage.seconds for stage in self.stages) + self.other

    @property
    def most(self) -> float:
        """Upper limit of the seconds: all allowed products, and MARGIN times as long each."""
        return MARGIN * (sum(stage.most for stage in self.stages) + self.other)

    @property
    def largest(self) -> Stage:
        """Stage with the highest memory peak."""
        return max(self.stages, key=lambda stage: stage.memory)

    @property
    def memory(self) -> int:
        """Bytes at the peak."""
        return self.largest.memory

    @property
    def fits(self) -> bool:
        """Return True if the peak fits into the available memory."""
        return self.memory <= self.base + self.free


def kinds_of(steps: Sequence[Step]) -> dict[ProductKind, int]:
    """Return the kinds of products to measure and how many a study needs, the most important first.

    A few operators stand for many, from the first to the last. One of every name comes first,
    then one of every operator, then other numbers of columns, which are measured only for single operators.
    """
    asked: dict[ProductKind, int] = {}
    several: set[ProductKind] = set()
    for step in steps:
        for space in sampled(step):
            kind, count = ProductKind(step.kind, space, step.columns), len(step.spaces)
            asked[kind] = max(asked.get(kind, 0), int(step.products / (count * step.columns)))
            several |= {kind} if count > 1 else set()
    wanted = [k for k in asked if k not in several or k.columns == 1 or k._replace(columns=1) not in asked]
    order = sorted(wanted, key=lambda kind: (kind.columns, KNOWN.index(kind.name)))
    names = {kind.name: kind for kind in reversed(order)}
    operators = {(kind.name, kind.space): kind for kind in reversed(order)}
    first = sorted(names.values(), key=order.index)
    return {kind: asked[kind] for kind in [*first, *sorted(operators.values(), key=order.index), *order]}


def predict(
    problem: Problem, steps: Sequence[Step], measured: ProductMeasurements, other: float
) -> CostPrediction:
    """Add up the steps in order; `other` are seconds that do not depend on the model."""
    state = _BuiltOperators(problem, measured)
    stages = [state.stage(step) for step in steps]
    if problem.device.type == "cpu":
        held = stages[-1].graphs if stages else 0
        stages.append(Stage(DRAWN, 0, 0.0, 0.0, 0, held, measured.base + held + FIGURES))
    passing = max(taken.passing for taken in measured.taken.values())
    return CostPrediction(tuple(stages), other + AROUND, measured.base, measured.free, passing)


class _BuiltOperators:
    """Track the graphs and operators that exist as the steps proceed."""

    def __init__(self, problem: Problem, measured: ProductMeasurements):
        self._problem, self._measured = problem, measured
        self._batches = problem.batches.num_sequences / problem.batches[0].num_sequences
        self._budget = int(SHARE * measured.free)
        self._graphs: dict[Any, float] = {}  # bytes by operator
        self._known: set[tuple[str, Globs]] = set()  # operators that exist

    def stage(self, step: Step) -> Stage:
        """Return the cost of a step."""
        taken = _mean([self._of(ProductKind(step.kind, space, step.columns)) for space in sampled(step)])
        fits = taken.graph <= self._budget
        new = self._keep(step, self._batches * taken.graph if fits else 0.0)
        sizes = [self._problem.space(*space).size for space in step.spaces]
        expected, most = (
            self._seconds(step, taken, products, sizes, new)
            for products in (step.products, max(step.most, step.products))
        )
        entry = torch.finfo(self._problem.dtype).bits // 8
        length = step.basis
        if (
            self._problem.device.type == "cpu"
        ):  # memory that was never written to is not counted by the system
            length = min(length, int(step.products / (step.columns * len(sizes))) + 1)
        vectors = step.columns * (length + BUFFERS) * max(sizes) * entry
        graphs = int(min(sum(self._graphs.values()), self._budget))
        passing = taken.passing + (0 if fits else taken.graph)  # a graph that is not kept is temporary memory
        memory = self._measured.base + graphs + vectors + passing
        return Stage(step.what, step.products, expected, most, vectors, graphs, memory, step.columns)

    def _keep(self, step: Step, size: float) -> int:
        """Record the graphs of a step, `size` bytes each, and return how many of its operators are new.

        If a step rebuilds its operators, only one of them exists at a time and replaces the earlier ones. If
        the step is a piece of its own, graphs of other kinds are freed as well.
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

    def _of(self, kind: ProductKind) -> ProductCost:
        """Return the cost of a kind; if it was not measured, that of the most similar measured kind."""
        measured, n = self._measured.taken, self._problem.space(*kind.space).size

        def distance(other: ProductKind) -> tuple[bool, bool, float, int]:
            m = self._problem.space(*other.space).size
            differs = other.name != kind.name, other.space != kind.space
            return *differs, max(n, m) / min(n, m), abs(other.columns - kind.columns)

        return measured[min(measured, key=distance)]

    def _seconds(self, step: Step, taken: ProductCost, products: float, sizes: list[int], new: int) -> float:
        n, (row, kept, file) = sum(sizes) / len(sizes), self._measured.around
        length = min(step.basis, products / (step.columns * len(sizes)))
        each = self._batches * step.share * taken.seconds + n * length / 2 * row
        writing = products * n * kept + products / step.columns * file
        journal = min(writing, max(PATIENCE * len(sizes), MOST_OF_TIME * products * each))
        anew = self._batches * taken.graph > self._budget
        built = products / step.columns if anew else new
        return products * each + journal + built * self._batches * taken.building + new * taken.opening


def sampled(step: Step) -> list[Globs]:
    """Return all parameter groups of a step, or a few evenly spaced ones if there are many."""
    count = len(step.spaces)
    if count <= SAMPLED:
        return list(step.spaces)
    return [step.spaces[int((i + 0.5) * count / SAMPLED)] for i in range(SAMPLED)]


def _mean(costs: Sequence[ProductCost]) -> ProductCost:
    """Return the mean cost; for temporary memory, the maximum."""
    count = len(costs)
    return ProductCost(
        sum(t.seconds for t in costs) / count,
        sum(t.building for t in costs) / count,
        sum(t.graph for t in costs) // count,
        max(t.passing for t in costs),
        sum(t.opening for t in costs) / count,
    )


# --------------------------------------------------------------------------------------------------- forecast


@final
@dataclass(frozen=True)
class Forecast:
    """Predicted cost of a study on a problem, with the measurements it is based on."""

    study: str
    cfg: ModelOnData
    problem: Problem
    measured: ProductMeasurements
    prediction: CostPrediction


def forecast(
    name: str,
    study: Study[Config],
    cfg: Config,
    *,
    clock: Clock = time.perf_counter,
    model: Model | None = None,
) -> Forecast | None:
    """Measure a few products and predict the cost of a study; None if the study has no plan.

    Args:
        clock: function that returns the time in seconds.
        model: the model of the configuration, if it is loaded already.
    """
    if study.plan is None or not isinstance(cfg, ModelOnData):
        return None
    problem = make_problem(cfg, model)
    plan = study.plan
    steps = plan.steps(cfg, problem)
    measured = measure(problem, cfg, kinds_of(steps), clock)
    prediction = predict(problem, steps, measured, plan.seconds(cfg))
    return Forecast(name, cfg, problem, measured, prediction)


# ----------------------------------------------------------------------------------------------------- advice

AGAIN = 2  # layers whose activations exist at once with checkpointing
LENGTHS = {
    "eigenvalues": ("num_steps",), "parts of the data": ("part_steps",), "ceilings": ("block_steps",),
    "ends": ("num_sharp_steps",), "": ("num_density_steps", "num_steps", "num_sharp_steps"),
}  # fmt: skip
"""Settings that determine how many vectors a stage keeps, by the beginning of the stage's name."""
COUNTS = ("num_probes", "num_density_probes", "num_trace_probes", "num_steps", "num_density_steps")
"""Names of settings to which the number of products is proportional."""


def advice(forecast: Forecast) -> list[str]:
    """Advise how to fit the run into memory, and how to shorten it if it takes over a day."""
    return [*_memory(forecast), *_time(forecast)]


def _time(forecast: Forecast) -> list[str]:
    """Advice on time: it is proportional to probes, steps and tokens."""
    if forecast.prediction.seconds <= DAY:
        return []
    names = forecast.cfg.to_dict()
    counts = [f"{name} ({names[name]})" for name in COUNTS if names.get(name)]
    fewer = f"use fewer tokens ({forecast.cfg.tokens:,})"
    if forecast.cfg.data.startswith(TASK):
        fewer = "use a smaller task"
    fewer += f", smaller {', '.join(counts)}" if counts else ""
    card = "; use --device cuda if a GPU is available" if forecast.problem.device.type == "cpu" else ""
    return [
        f"the run takes over a day. To shorten it, {fewer}: the time is proportional to each of them. "
        f"With --budget 1h, the study chooses all settings you do not give{card}"
    ]


def _memory(forecast: Forecast) -> list[str]:
    p = forecast.prediction
    if p.fits:
        return [f"it fits into memory: {data_size(p.base + p.free - p.memory)} remain free"]
    top = p.largest
    passing = top.memory - p.base - top.graphs - top.vectors
    lines = [
        f"it does not fit into memory: {data_size(p.memory - p.base - p.free)} are missing. Possible changes:"
    ]
    lines += _smaller_batch(forecast, passing, p.free - top.vectors)
    lines += _computed_again(forecast, passing)
    lines += _fewer_vectors(forecast, p.free - passing)
    lines += _fewer_blocks(forecast, p.free - passing)
    return lines + _ranks(forecast, passing)


def _smaller_batch(forecast: Forecast, passing: int, room: int) -> list[str]:
    """Advice on the batch size, to which the memory of activations is proportional."""
    now = forecast.problem.batches[0].num_sequences
    fitting = int(now * room / max(passing, 1))
    if not 1 <= fitting < now:
        return []
    return [
        f"\x20 batch: --set batch_size={fitting} instead of {now}: a product uses {data_size(passing)} "
        "of temporary memory, in proportion to the batch; results change only by rounding"
    ]


def _computed_again(forecast: Forecast, passing: int) -> list[str]:
    depth = forecast.problem.model.facts.get("n_layers")
    if forecast.cfg.checkpoint or not isinstance(depth, int) or depth <= AGAIN:
        return []
    less = data_size(AGAIN * passing // depth)
    return [
        f"\x20 checkpoint: --set checkpoint=true: recompute the layers; about {less} instead of "
        f"{data_size(passing)}, two to three times the time"
    ]


def _fewer_vectors(forecast: Forecast, room: int) -> list[str]:
    """Advice on the size of an algorithm's basis, if it takes most of the memory.

    Eigenvalues are skipped: they use the available memory, independent of the settings. Fewer probes help if
    several are multiplied at once.
    """
    top, names = forecast.prediction.largest, forecast.cfg.to_dict()
    column, buffers = _column(forecast), BUFFERS * top.columns
    fitting, now = room // column - buffers, top.vectors // column - buffers
    known = next(those for start, those in LENGTHS.items() if top.what.startswith(start))
    setting = next((name for name in known if name in names), None)
    if setting is None or top.most > top.seconds or not 2 <= fitting < now:
        return []
    return [
        f"\x20 vectors: {top.what} stores {now} vectors of {data_size(column)} each; {fitting} would "
        f"fit. Use a smaller {setting}{' or fewer probes' if top.columns > 1 else ''}"
    ]


def _fewer_blocks(forecast: Forecast, room: int) -> list[str]:
    top, size = forecast.prediction.largest, forecast.problem.space().size
    if "blocks" not in forecast.cfg.to_dict() or top.vectors <= room or room <= 0:
        return []
    most = int(size * room / top.vectors)
    return [
        f"\x20 blocks: for instance --blocks 'L0.*': vectors over at most {most:,} of {size:,} parameters fit"
    ]


def _ranks(forecast: Forecast, passing: int) -> list[str]:
    """Advice on ranks: they share parameters and vectors, but not the temporary memory of a layer."""
    p = forecast.prediction
    room = p.base + p.free - passing
    if room <= 0:
        return [
            "\x20 ranks: more ranks do not help while one product does not fit; use a smaller batch first"
        ]
    count = math.ceil((p.base + p.largest.vectors) / room)
    if count < 2:
        return []
    if not find(forecast.study).on_pieces:
        return []
    return [
        f"\x20 ranks: torchrun --nproc-per-node {count} -m curvescope … --parallel shards: splits "
        f"parameters and vectors into {count} shards"
    ]


def _column(forecast: Forecast) -> int:
    """Bytes of a vector over all differentiated parameters."""
    return forecast.problem.space().size * torch.finfo(forecast.problem.dtype).bits // 8
