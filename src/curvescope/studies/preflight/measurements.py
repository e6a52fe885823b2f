"""Time and memory of one product on this machine, measured on parts of the data.

Matrix products grow with the number of tokens, attention with the square of the sequence length T. A layer of
width d takes 24 d² operations per token in matrix products and 4 d T in attention. For s sequences,

    w = s T (1 + T / 6d),    time  a + b w,    memory  c s T (1 + q T),

where w is the work and a is the cost of the weights, independent of the data. q is 0 unless attention stores
its T × T scores; then it is h / 16d for h heads. Measurements on two parts of the data determine a and b.

A product processes the batches one after the other, so measuring the first batch is enough. On a CPU, a
product on the first tokens of one sequence shows how much of the batch can be measured within PATIENCE and
half of the memory. The rest is extrapolated with these formulas. On a GPU the full first batch is measured.
"""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.vectors import orthogonalize
from curvescope.core.errors import CurvescopeError
from curvescope.core.number_format import data_size
from curvescope.core.operator import Identity
from curvescope.core.seeds import probes
from curvescope.core.tensors import leaves
from curvescope.data.batches import IGNORED, Batch
from curvescope.engines.memory import free_bytes
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import OPERATORS
from curvescope.operators.sources import FunctionalSources
from curvescope.problem import Problem
from curvescope.runs.disk.journal import Journal
from curvescope.studies.problem_config import ModelOnData, kind_of

if sys.platform != "win32":
    import resource

SHORTEST = 32  # tokens; with fewer, reading the weights dominates the time
CUT = ("causal-lm", "masked-lm")  # model tasks in which sequences can be cut to their first tokens
# Bytes per score relative to the bytes per token and unit of width (arXiv:2205.05198, 4.1, no dropout).
SCORES = 2 / 32


class DataSubset(NamedTuple):
    """The first tokens of some sequences of the first batch. `tokens` is 0 if sequences cannot be cut."""

    sequences: int
    tokens: int


def whole(problem: Problem) -> DataSubset:
    """Return the full first batch as a subset; `tokens` is set if sequences can be cut."""
    batch = problem.batches[0]
    return DataSubset(batch.num_sequences, _length(problem, batch))


def shortest(everything: DataSubset) -> DataSubset:
    """Return the first tokens of one sequence, or one full sequence if it cannot be cut."""
    return DataSubset(1, min(SHORTEST, everything.tokens))


def cuts(everything: DataSubset) -> list[DataSubset]:
    """Return ever smaller subsets of a batch: fewer sequences, then the first half of one, and so on."""
    count, length = everything
    subsets = [DataSubset(some, length) for some in range(count, 0, -1)]
    while length > SHORTEST:
        length = max(length // 2, SHORTEST)
        subsets.append(DataSubset(1, length))
    return subsets


def part(problem: Problem, cut: DataSubset) -> Problem:
    """Return the problem on a subset of its first batch."""
    batch = problem.batches[0][: cut.sequences]
    if cut.tokens:
        batch = batch.map(lambda tensor: tensor[:, : cut.tokens])
    return Problem(problem.model, [batch], loss=problem.loss)


def work(problem: Problem, cut: DataSubset) -> float:
    """Return the work s T (1 + T / 6d), or the number of sequences if their length is unknown."""
    if not cut.tokens:
        return float(cut.sequences)
    return cut.sequences * cut.tokens * (1 + cut.tokens / (6 * width(problem)))


def size(cut: DataSubset, squares: float) -> float:
    """Return s T (1 + q T); memory is linear in it."""
    return cut.sequences * max(cut.tokens, 1) * (1 + squares * cut.tokens)


def width(problem: Problem) -> int:
    """Return the width d from the model's facts, or that of a Transformer with this many parameters."""
    facts = problem.model.facts
    layers = facts.get("n_layers") or 1
    return int(facts.get("d_model") or max(1, math.isqrt(problem.model.num_parameters // (12 * layers))))


def slower(small: tuple[float, float], large: tuple[float, float], at: float) -> float:
    """Return time(`at`) / time(large), from (work, seconds) of a small and a large measurement.

    If the small measurement was not faster, a cannot be determined, and time is taken as proportional to
    work.
    """
    (w, t), (W, T) = small, large
    b = (T - t) / (W - w) if w < W else 0.0
    b = min(b, T / W) if b > 0 else T / W
    return 1 + b * (at - W) / T


def scores(problem: Problem, *, fused: bool) -> float:
    """Return q: bytes of scores that plain attention stores per token pair and head, or 0 if fused."""
    return 0.0 if fused else SCORES * (problem.model.facts.get("n_heads") or 1) / width(problem)


def _length(problem: Problem, batch: Batch) -> int:
    """Return T if the inputs are token ids and every tensor has a second axis of this length, else 0.

    Returns 0 as well if the first tokens of a sequence have no target, or if the model accepts only one
    length.
    """
    lengths = {tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in batch.tensors()}
    ids = not any(tensor.is_floating_point() for tensor in leaves(batch.inputs))
    if len(lengths) > 1 or not ids or kind_of(problem.model) not in CUT or min(lengths) <= SHORTEST:
        return 0
    targets = batch.targets
    if isinstance(targets, Tensor) and not bool((targets[:1, :SHORTEST] != IGNORED).any()):
        return 0
    return min(lengths) if _takes_less(problem, min(lengths)) else 0


def _takes_less(problem: Problem, length: int) -> bool:
    try:
        part(problem, DataSubset(1, min(SHORTEST, length))).loss_value()
    except (CurvescopeError, RuntimeError, ValueError, IndexError):
        return False
    return True


# ------------------------------------------------------------------------------------------------------ meter


STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@final
class MemoryMeter:
    """Memory of one device in bytes; outside Linux the peak is that of the whole process."""

    def __init__(self, device: torch.device):
        self._device = device

    def begin(self) -> int:
        """Free unused memory, reset the peak, and return the bytes in use."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        with suppress(OSError, AttributeError):  # not Linux
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # reuse of freed memory would hide how much is needed
            FORGET.write_text("5", encoding="ascii")
        return self.now()

    def now(self) -> int:
        """Return the bytes in use."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _status("VmRSS")

    def peak(self) -> int:
        """Return the most bytes in use since `begin`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status("VmHWM")

    def free(self) -> int:
        """Return the bytes that are free now."""
        return free_bytes(self._device)


def _status(field: str) -> int:
    """Return a memory size of this process from /proc; outside Linux, return its peak."""
    try:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return _peak_elsewhere()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def _peak_elsewhere() -> int:
    if sys.platform == "win32":
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


# ------------------------------------------------------------------------------------------------------ bench

CALLS = 4  # calls per kind if they are fast
LEAST = 2  # the first call builds the graph, the second runs as in an algorithm
PASSED = 2  # vectors that the algorithm owns: the input and the product
Clock = Callable[[], float]


class ProductKind(NamedTuple):
    """Products of one operator over some parameters, with a number of columns."""

    name: str
    space: tuple[str, ...]
    columns: int


class ProductCost(NamedTuple):
    """Cost of one kind of product on one full batch."""

    seconds: float  # per vector
    building: float  # extra seconds of the first products
    graph: int  # bytes that stay allocated
    passing: int  # bytes that are allocated only during a product, without its input and output
    opening: float = 0.0  # seconds of setup before the first product, independent of the data


@final
class ProductTimer:
    """Run products on a subset of the first batch, and measure their time and memory."""

    def __init__(self, problem: Problem, cfg: ModelOnData, meter: MemoryMeter, clock: Clock, cut: DataSubset):
        self.problem, self.cut = part(problem, cut), cut
        self._cfg, self._meter, self._clock = cfg, meter, clock
        self._operators: dict[
            str, CurvatureOperator
        ] = {}  # shared, because blocks of one operator share their graphs, as in studies
        self.fast, self.attends, self.why = False, False, ""

    def take(self, kind: ProductKind, calls: int = CALLS, *, patience: float = 0.0) -> ProductCost:
        """Measure at least LEAST products, and CALLS or more while `patience` lasts."""
        before = self._meter.begin()
        op, product, size = self._product(kind)
        seconds: list[float] = []
        opened = self._clock()
        with op.frozen():
            while len(seconds) < LEAST or (len(seconds) < max(calls, CALLS) and sum(seconds) < patience):
                start = self._clock()
                product()
                seconds.append(self._clock() - start)
        opened, peak = self._clock() - opened, self._meter.peak()
        del product  # frees the columns, which an algorithm would not keep
        after = self._meter.begin()
        self.fast, self.attends, self.why = (
            op.engine.name == "fast",
            op.engine.attends,
            op.engine.fallback_reason,
        )
        frozen = statistics.median(seconds[len(seconds) // 2 :])
        return ProductCost(
            frozen / kind.columns,
            max(sum(seconds) - frozen * len(seconds), 0.0),
            max(after - before, 0),
            max(peak - after - PASSED * size, 0),
            opened - sum(seconds),
        )

    def let_go(self) -> None:
        """Free the graphs of all operators."""
        self._operators.clear()

    def _product(self, kind: ProductKind) -> tuple[CurvatureOperator, Callable[[], Any], int]:
        """Return the operator, a call that waits for the device, and the bytes of the input."""
        problem = self.problem
        if kind.name in ("gradient", "loss"):
            call = problem.gradient if kind.name == "gradient" else problem.loss_value
            return self._operator("hessian"), lambda: torch.as_tensor(call()).sum().item(), 0
        if kind.name in ("sources", "source"):
            sources = FunctionalSources(problem)
            op = sources[next(iter(sources))]
        else:
            sources, op = None, self._operator(kind.name).block(list(kind.space) or "*")
        V = probes(op.shape[1], kind.columns, seed=0, dtype=op.dtype, device=op.device)
        if kind.name == "sources" and sources is not None:
            return op, lambda: sum(float(product.sum()) for product in sources.products(V).values()), V.nbytes
        return op, lambda: float((op @ V).sum()), V.nbytes

    def _operator(self, name: str) -> CurvatureOperator:
        if name not in self._operators:
            how: Any = {"engine": self._cfg.engine, "checkpoint": self._cfg.checkpoint}
            self._operators[name] = OPERATORS[name](self.problem, **how)
        return self._operators[name]


# ---------------------------------------------------------------------------------------------------- measure

PATIENCE = 4.0  # approximate seconds for all kinds together, and as much again if they are fast
# Multiples of the shortest subset, for the first kind if the others are measured on the shortest.
LONGER, LONGEST = (2, 4)
SLOW = 0.5  # seconds of one product on the shortest subset; if slower, kinds in LIKE are not measured
LIKE = {"functional": "hessian", "source": "sources"}
MOST = 2  # multiple of PATIENCE after which similar kinds are not measured
PILOT = 0.5  # approximate seconds for the first kind on the shortest subset
ENOUGH = 20  # most calls; an operator replays a recorded graph after a dozen products
ENTRIES = 2**21  # most entries of a vector on which the algorithms' own work is measured
ROWS = 8  # rows of the basis in that measurement


class AlgorithmCost(NamedTuple):
    """Seconds of an algorithm's own work, per vector entry and per file."""

    row: float  # per entry, to orthogonalize against one basis vector
    kept: float  # per entry, to store a vector for a resumable run
    file: float


class SubsetCost(NamedTuple):
    """A subset of the data, and the cost of a kind of product measured on it."""

    cut: DataSubset
    taken: ProductCost


@final
@dataclass(frozen=True)
class ProductMeasurements:
    """Measurements of a problem's products.

    Attributes:
        taken: cost by kind, on the full first batch.
        cut: the subset that was measured; `everything` is the full first batch.
        base: bytes in use before any product, including the weights.
        free: bytes that were free then.
        fast: True if our kernels were used; `attends`, also for attention; `why`, the reason if not.
    """

    taken: dict[ProductKind, ProductCost]
    around: AlgorithmCost
    cut: DataSubset
    everything: DataSubset
    base: int
    free: int
    fast: bool
    attends: bool
    why: str


def measure(
    problem: Problem, cfg: ModelOnData, requested: Mapping[ProductKind, int], clock: Clock
) -> ProductMeasurements:
    """Measure time and memory of every kind, on as much of the first batch as time and memory allow.

    Args:
        requested: number of products of every kind in the study, the most important kind first.
    """
    meter, first = MemoryMeter(problem.device), next(iter(requested))
    check_room(problem, first, meter.free())
    everything, card = whole(problem), problem.device.type == "cuda"
    make = partial(ProductTimer, problem, cfg, meter, clock)
    bench = make(DataSubset(1, everything.tokens) if card else shortest(everything))
    pilot = SubsetCost(bench.cut, bench.take(first, patience=PILOT))
    bench.let_go()
    base, free = meter.begin(), meter.free()  # measured after the first product, which loads libraries
    if pilot.taken.seconds > SLOW:
        requested = {
            kind: often for kind, often in requested.items() if kind == first or kind.name not in LIKE
        }
    wanted = everything if card else _affordable(problem, everything, pilot, list(requested), free)
    longer = _longer(everything, pilot, free) if wanted == pilot.cut != everything else None
    remaining = {kind: often for kind, often in requested.items() if longer is None or kind != first}
    points = {} if longer is None else {first: SubsetCost(longer, make(longer).take(first))}
    points |= _all_taken(make, remaining, clock, [c for c in cuts(everything) if c <= wanted])
    around, how = _around(problem, clock), (bench.fast, bench.attends, bench.why)
    grown = _grown(problem, everything, points, (pilot, points[first]), fused=bench.attends)
    taken = {kind: _once_for_all(kind, grown) for kind in requested if kind in grown}
    return ProductMeasurements(taken, around, points[first].cut, everything, base, free, *how)


def check_room(problem: Problem, kind: ProductKind, free: int) -> None:
    """Raise an error if the vectors of a single product do not fit into memory, before it starts."""
    entries = problem.space(*kind.space).size * torch.finfo(problem.dtype).bits // 8
    needed = (PASSED + 1) * kind.columns * entries  # input, output and a buffer for sums over parameters
    if needed > free:
        raise CurvescopeError(
            f"no product of {problem.model.name} was measured: its vectors alone take "
            f"{data_size(needed)}, and {data_size(free)} are free",
            hint=(
                "use fewer parameters, for instance blocks='L0.*' if the study has this setting, or "
                "several ranks"
            ),
        )


def _affordable(
    problem: Problem, everything: DataSubset, pilot: SubsetCost, kinds: Sequence[ProductKind], free: int
) -> DataSubset:
    """Return the largest subset on which all kinds can be measured within the time and memory limits."""
    least, small = pilot
    building = min(small.building, LEAST * small.seconds)
    seconds = sum(LEAST * kind.columns * small.seconds + building for kind in kinds)
    held = small.graph + max(kind.columns for kind in kinds) * small.passing

    def fits(cut: DataSubset) -> bool:
        times, data = work(problem, cut) / work(problem, least), size(cut, 0.0) / size(least, 0.0)
        return times * seconds <= PATIENCE and data * held <= free / 2

    return next(filter(fits, cuts(everything)), least)


def _all_taken(
    make: Callable[[DataSubset], ProductTimer],
    requested: Mapping[ProductKind, int],
    clock: Clock,
    fits: list[DataSubset],
) -> dict[ProductKind, SubsetCost]:
    """Measure every kind on the first subset; if memory runs out, try again with half of it."""
    bench, patience = make(fits[0]), PATIENCE / max(len(requested), 1)
    taken: dict[ProductKind, SubsetCost] = {}
    start = clock()
    try:
        for kind, often in requested.items():
            if clock() - start < MOST * PATIENCE or kind.name not in {known.name for known in taken}:
                taken[kind] = SubsetCost(bench.cut, bench.take(kind, min(often, ENOUGH), patience=patience))
        return taken
    except torch.OutOfMemoryError as error:
        half = [cut for cut in fits if size(cut, 0.0) <= size(fits[0], 0.0) / 2]
        if not half:
            raise CurvescopeError(
                f"not enough memory for a product of {bench.problem.model.name} on {_words(bench.cut)}",
                hint="checkpoint=True, a smaller seq_len, or more ranks",
            ) from error
    bench.let_go()
    return _all_taken(make, requested, clock, half)


def _words(cut: DataSubset) -> str:
    return f"{cut.tokens} tokens" if cut.tokens else "one sequence"


def _once_for_all(kind: ProductKind, taken: Mapping[ProductKind, ProductCost]) -> ProductCost:
    """Return the cost of a kind. Its graph is shared by products with any number of columns."""
    same = [some for other, some in taken.items() if other._replace(columns=kind.columns) == kind]
    building, graph = max(some.building for some in same), max(some.graph for some in same)
    return taken[kind]._replace(building=building, graph=graph)


def _longer(everything: DataSubset, pilot: SubsetCost, free: int) -> DataSubset | None:
    """Return a longer subset for the first kind if all kinds are measured on the shortest one.

    Returns None if sequences cannot be cut or memory is too small.
    """
    seconds, held = pilot.taken.seconds, pilot.taken.graph + pilot.taken.passing
    times = LONGEST if LEAST * LONGEST * seconds <= MOST * PATIENCE else LONGER
    cut = DataSubset(1, min(times * pilot.cut.tokens, everything.tokens))
    return cut if cut.tokens > pilot.cut.tokens and times * held <= free / 2 else None


def _grown(
    problem: Problem,
    everything: DataSubset,
    taken: Mapping[ProductKind, SubsetCost],
    ends: tuple[SubsetCost, SubsetCost],
    *,
    fused: bool,
) -> dict[ProductKind, ProductCost]:
    """Extrapolate to the full batch: graphs grow with the data, and so does temporary memory beyond the
    vectors.

    Args:
        ends: a small and a large subset on which the first kind was measured.
        fused: True if attention stores no scores.
    """
    small, large = ends
    (w, t), (W, T) = ((work(problem, end.cut), end.taken.seconds) for end in ends)
    squares = scores(problem, fused=fused)
    more = large.taken.passing - small.taken.passing
    apart = size(large.cut, squares) - size(small.cut, squares)
    each = more / apart if more > 0 and apart > 0 else 0.0
    column = problem.model.num_parameters * torch.finfo(problem.dtype).bits // 8
    all_of_it = slower((w, t), (W, T), work(problem, everything)), size(everything, squares)
    costs = {}
    for kind, (cut, some) in taken.items():
        measured = slower((w, t), (W, T), work(problem, cut)), size(cut, squares)
        time, data = (whole / part for whole, part in zip(all_of_it, measured, strict=True))
        fixed = min(some.passing, _vectors(problem, kind) * column)
        passing = fixed + data * (some.passing - fixed)
        passing = max(passing, some.passing + each * kind.columns * (all_of_it[1] - measured[1]))
        grown = some.seconds * time, some.building * time, int(some.graph * data), int(passing)
        costs[kind] = ProductCost(*grown, opening=some.opening)
    return costs


def _vectors(problem: Problem, kind: ProductKind) -> int:
    """Return the most temporary vectors during a product; FunctionalSources needs two per source."""
    each = 4 - PASSED + (2 * len(FunctionalSources(problem)) if kind.name == "sources" else 0)
    return each * kind.columns


def _around(problem: Problem, clock: Clock) -> AlgorithmCost:
    """Measure the algorithms' own work on vectors of up to ENTRIES entries; beyond, it is proportional."""
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
        return AlgorithmCost(
            _timed(row, clock) / (n * ROWS), max(_timed(lambda: kept(n), clock) - file, 0.0) / n, file
        )


def _timed(call: Callable[[], None], clock: Clock) -> float:
    """Return the seconds of a call, the minimum of three."""
    seconds = []
    for _ in range(3):
        start = clock()
        call()
        seconds.append(clock() - start)
    return min(seconds)
