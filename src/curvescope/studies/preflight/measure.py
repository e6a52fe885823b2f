"""What a product takes on this device: seconds and bytes, measured on a share of the first batch.

A product goes through the batches one after the other, so the first batch stands for all. Where all that is
to be measured would take more than PATIENCE, it is measured on fewer sequences s of the B, and

    t(B) = t(s) (a + b B) / (a + b s)

with a + b s the time of the first kind, measured on two numbers of sequences: weights are read once for all.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch

from curvescope.algorithms.vectors import orthogonalize
from curvescope.core.errors import CurvescopeError
from curvescope.core.operator import Identity
from curvescope.core.seeds import probes
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import OPERATORS
from curvescope.operators.sources import Sources
from curvescope.problem import Problem
from curvescope.runs.disk.journal import Journal
from curvescope.studies.preflight.meter import Meter
from curvescope.studies.setting import ModelOnData

PATIENCE = 4.0  # seconds for all kinds together, about, and as much again where they are quick
MOST = 2  # times that: then kinds that are like others are not measured
CALLS = 4  # of a kind at least: the first builds, and later ones are as in an algorithm
ENOUGH = 20  # calls at most; a product that was asked for a dozen times is recorded and replayed
ENTRIES = 2**21  # of a vector that the work of algorithms is measured on, or all
ROWS = 8  # of a basis for that
Clock = Callable[[], float]


class Kind(NamedTuple):
    """Products with so many columns of one operator over some parameters."""

    name: str
    space: tuple[str, ...]
    columns: int


class Taken(NamedTuple):
    """What a kind takes on one whole batch."""

    seconds: float  # of each vector
    building: float  # seconds that the first products take more
    graph: int  # bytes that are kept
    passing: int  # bytes beyond those while a product is taken


class Around(NamedTuple):
    """Seconds of an algorithm besides products, for each entry of a vector; and for each file."""

    row: float  # to make it orthogonal to one vector of a basis
    kept: float  # to keep it for a run that is stopped
    file: float


@final
@dataclass(frozen=True)
class Measured:
    """What was measured of a problem.

    Attributes:
        taken: by kind.
        sequences: of the first batch, that it was measured on.
        base: bytes before any product, weights among them.
        free: bytes that could be taken then.
        fast: whether our kernels were used; `attends`, for attention; and `why` not.
    """

    taken: dict[Kind, Taken]
    around: Around
    sequences: int
    base: int
    free: int
    fast: bool
    attends: bool
    why: str


def measure(problem: Problem, cfg: ModelOnData, asked: Mapping[Kind, int], clock: Clock) -> Measured:
    """Seconds and bytes of every kind, on as many sequences as there are time and memory for.

    Args:
        asked: how often a study asks for products of every kind, the most telling kind first.
    """
    kinds = list(asked)
    meter, whole = Meter(problem.device), problem.batches[0].num_sequences
    one = _Bench(problem, cfg, 1, meter, clock)
    small = one.take(kinds[0])
    one.let_go()
    base, free = meter.begin(), meter.free()  # libraries that a first product loads are there
    count, taken = _all_taken(problem, cfg, asked, meter, clock, _affordable(problem, small, kinds, free))
    if count == 1 < whole:
        other, at = _Bench(problem, cfg, 2, meter, clock).take(kinds[0]), 2
    else:
        other, at = small, 1
    first = taken[kinds[0]].seconds
    slope = max(0.0, (other.seconds - first) / (at - count)) if at != count else 0.0
    column = problem.model.num_parameters * torch.finfo(problem.dtype).bits // 8
    growth = 1 + slope * (whole - count) / first, whole / count
    return Measured(
        {kind: _grown(some, *growth, _vectors(problem, kind) * column) for kind, some in taken.items()},
        _around(problem, clock),
        count,
        base,
        free,
        one.fast,
        one.attends,
        one.why,
    )


def _affordable(problem: Problem, small: Taken, kinds: Sequence[Kind], free: int) -> int:
    """Sequences of the first batch that all kinds can be measured on; a card is measured on all of them."""
    whole = problem.batches[0].num_sequences
    seconds = CALLS * sum(kind.columns for kind in kinds) * small.seconds
    if problem.device.type == "cuda":
        return whole
    held = max(1, small.graph + max(kind.columns for kind in kinds) * small.passing)
    return max(1, min(whole, int(PATIENCE / max(seconds, 1e-9)), int(free / 2 / held)))


def _all_taken(
    problem: Problem, cfg: ModelOnData, asked: Mapping[Kind, int], meter: Meter, clock: Clock, count: int
) -> tuple[int, dict[Kind, Taken]]:
    """What every kind takes on so many sequences, or on half as many where these do not fit."""
    bench, patience = _Bench(problem, cfg, count, meter, clock), PATIENCE / len(asked)
    taken: dict[Kind, Taken] = {}
    start = clock()
    try:
        for kind, often in asked.items():
            if clock() - start < MOST * PATIENCE or kind.name not in {known.name for known in taken}:
                taken[kind] = bench.take(kind, min(often, ENOUGH), patience=patience)
        return count, {kind: _once_for_all(kind, taken) for kind in taken}
    except torch.OutOfMemoryError as error:
        if count == 1:
            raise CurvescopeError(
                f"a product of {problem.model.name} on one sequence takes more memory than there is",
                hint="checkpoint=True, a smaller seq_len, or more ranks",
            ) from error
    return _all_taken(problem, cfg, asked, meter, clock, count // 2)


def _once_for_all(kind: Kind, taken: dict[Kind, Taken]) -> Taken:
    """What a kind takes, its graph being that which was built for any number of columns of its operator."""
    same = [some for other, some in taken.items() if other._replace(columns=kind.columns) == kind]
    building, graph = max(some.building for some in same), max(some.graph for some in same)
    return taken[kind]._replace(building=building, graph=graph)


def _vectors(problem: Problem, kind: Kind) -> int:
    """Vectors that pass at most while a product is taken: of all sources together, two for each."""
    each = 4 + (2 * len(Sources(problem)) if kind.name == "sources" else 0)
    return each * kind.columns


def _grown(taken: Taken, time: float, data: float, vectors: int) -> Taken:
    """On a whole batch: what is kept grows as the data do, of what passes that beyond the vectors."""
    fixed = min(taken.passing, vectors)
    passing = fixed + data * (taken.passing - fixed)
    return Taken(taken.seconds * time, taken.building * time, int(taken.graph * data), int(passing))


class _Bench:
    """Products on some sequences of the first batch."""

    def __init__(self, problem: Problem, cfg: ModelOnData, sequences: int, meter: Meter, clock: Clock):
        batch = problem.batches[0][:sequences]
        self._problem = Problem(problem.model, [batch], loss=problem.loss)
        self._cfg, self._meter, self._clock = cfg, meter, clock
        self._operators: dict[str, CurvatureOperator] = {}  # their blocks share what they keep, as in studies
        self.fast, self.attends, self.why = False, False, ""

    def take(self, kind: Kind, calls: int = CALLS, *, patience: float = 0.0) -> Taken:
        """At least CALLS products, up to `calls` while there is patience."""
        before = self._meter.begin()
        op, product = self._product(kind)
        seconds: list[float] = []
        opened = self._clock()
        with op.steady():
            while len(seconds) < CALLS or (len(seconds) < calls and sum(seconds) < patience):
                start = self._clock()
                product()
                seconds.append(self._clock() - start)
        opened, peak = self._clock() - opened, self._meter.peak()
        del product  # and the columns with it: they pass
        after = self._meter.begin()
        self.fast, self.attends, self.why = op.engine.name == "fast", op.engine.attends, op.engine.why
        steady = statistics.median(seconds[len(seconds) // 2 :])
        building = opened - steady * len(seconds)
        return Taken(steady / kind.columns, max(building, 0.0), max(after - before, 0), max(peak - after, 0))

    def let_go(self) -> None:
        """Free what operators keep."""
        self._operators.clear()

    def _product(self, kind: Kind) -> tuple[CurvatureOperator, Callable[[], Any]]:
        """The operator, and a call that is done when a card has done it."""
        problem = self._problem
        if kind.name in ("gradient", "loss"):
            call = problem.gradient if kind.name == "gradient" else problem.value
            return self._operator("hessian"), lambda: torch.as_tensor(call()).sum().item()
        if kind.name in ("sources", "source"):
            sources = Sources(problem)
            op = sources[next(iter(sources))]
        else:
            sources, op = None, self._operator(kind.name).block(list(kind.space) or "*")
        V = probes(op.shape[1], kind.columns, seed=0, dtype=op.dtype, device=op.device)
        if kind.name == "sources" and sources is not None:
            return op, lambda: sum(float(found.sum()) for found in sources.products(V).values())
        return op, lambda: float((op @ V).sum())

    def _operator(self, name: str) -> CurvatureOperator:
        if name not in self._operators:
            how: Any = {"engine": self._cfg.engine, "checkpoint": self._cfg.checkpoint}
            self._operators[name] = OPERATORS[name](self._problem, **how)
        return self._operators[name]


def _around(problem: Problem, clock: Clock) -> Around:
    """On vectors of ENTRIES entries, or of all: longer ones take as much for each."""
    n = min(problem.space().size, ENTRIES)
    like = {"dtype": problem.dtype, "device": problem.device}
    basis, w = torch.zeros(ROWS, n, **like), torch.ones(n, **like)
    basis.fill_diagonal_(1.0)
    w[:ROWS] = 0.0
    expected = np.zeros(ROWS)

    def row() -> None:
        orthogonalize(basis, w, out=torch.empty_like(w), expected=expected, tol=1.0)

    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), lambda: Path(folder))

        def kept(entries: int) -> None:
            journal.product(Identity(entries, **like), w[:entries, None])

        file = _timed(lambda: kept(ROWS), clock)
        return Around(
            _timed(row, clock) / (n * ROWS), max(_timed(lambda: kept(n), clock) - file, 0.0) / n, file
        )


def _timed(call: Callable[[], None], clock: Clock) -> float:
    """Seconds of a call, the least of three."""
    found = []
    for _ in range(3):
        start = clock()
        call()
        found.append(clock() - start)
    return min(found)
