"""Seconds and bytes that a study takes, from its steps and what was measured of one product.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch

from curvescope.engines.graph_cache import SHARE
from curvescope.problem import Problem
from curvescope.runs.disk.journal import MOST_OF_TIME, PATIENCE
from curvescope.runs.study import Step
from curvescope.studies.preflight.bench import Kind, Taken
from curvescope.studies.preflight.measure import Measured

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
