"""What one product takes on this machine: time and memory, measured on parts of the data.

Matrix products grow as the tokens do, attention as the square of the length T of a sequence. A layer of width
d takes 24 d² operations a token in matrix products and 4 d T in attention, so s sequences are the work

    w = s T (1 + T / 6d),    time  a + b w,    memory  c s T (1 + q T),

where a is what weights take whatever the data are, and q is 0 unless attention keeps its T × T scores: then
h / 16d for h heads. From two parts that were measured a and b are fitted.

A product goes through the batches one after the other, so the first batch stands for all. On a CPU a product
on the first tokens of one sequence says how much of the batch can be measured in PATIENCE, in half of the
memory; from there to the whole batch it is reckoned as `cut` says. A card is measured on all of it.
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
from curvescope.core.numbers import data_size
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
from curvescope.studies.setting import ModelOnData, kind_of

if sys.platform != "win32":
    import resource

SHORTEST = 32  # tokens: with fewer, weights are read for little else
CUT = ("causal-lm", "masked-lm")  # what models are made for whose sequences may end earlier
SCORES = 2 / 32  # bytes a score to those a number of a token's width (arXiv:2205.05198, 4.1, no dropout)


class Cut(NamedTuple):
    """So many sequences of the first batch, the first tokens of each; 0 tokens: they cannot be cut."""

    sequences: int
    tokens: int


def whole(problem: Problem) -> Cut:
    """All of the first batch; tokens are counted where sequences can be cut."""
    batch = problem.batches[0]
    return Cut(batch.num_sequences, _length(problem, batch))


def shortest(everything: Cut) -> Cut:
    """The first tokens of one sequence, or one that cannot be cut."""
    return Cut(1, min(SHORTEST, everything.tokens))


def cuts(everything: Cut) -> list[Cut]:
    """All of a batch, then less and less: fewer sequences, then the first half of one, and so on."""
    count, length = everything
    found = [Cut(some, length) for some in range(count, 0, -1)]
    while length > SHORTEST:
        length = max(length // 2, SHORTEST)
        found.append(Cut(1, length))
    return found


def part(problem: Problem, cut: Cut) -> Problem:
    """The problem on a part of its first batch."""
    batch = problem.batches[0][: cut.sequences]
    if cut.tokens:
        batch = batch.map(lambda tensor: tensor[:, : cut.tokens])
    return Problem(problem.model, [batch], loss=problem.loss)


def work(problem: Problem, cut: Cut) -> float:
    """s T (1 + T / 6d), or the sequences where their length is not known."""
    if not cut.tokens:
        return float(cut.sequences)
    return cut.sequences * cut.tokens * (1 + cut.tokens / (6 * width(problem)))


def size(cut: Cut, squares: float) -> float:
    """s T (1 + q T), in which memory is linear."""
    return cut.sequences * max(cut.tokens, 1) * (1 + squares * cut.tokens)


def width(problem: Problem) -> int:
    """d as the model says it, else that of a Transformer with as many parameters and layers."""
    facts = problem.model.facts
    layers = facts.get("n_layers") or 1
    return int(facts.get("d_model") or max(1, math.isqrt(problem.model.num_parameters // (12 * layers))))


def slower(small: tuple[float, float], large: tuple[float, float], at: float) -> float:
    """How many times longer work `at` takes than the large one, from (work, seconds) of a small and a large.

    Where the small one did not take less, nothing is known of a, and time is taken to grow as the work.
    """
    (w, t), (W, T) = small, large
    b = (T - t) / (W - w) if w < W else 0.0
    b = min(b, T / W) if b > 0 else T / W
    return 1 + b * (at - W) / T


def scores(problem: Problem, *, fused: bool) -> float:
    """q: that of plain attention, which keeps a score for every pair of tokens and head, or 0."""
    return 0.0 if fused else SCORES * (problem.model.facts.get("n_heads") or 1) / width(problem)


def _length(problem: Problem, batch: Batch) -> int:
    """T where inputs are ids, and all tensors have a second axis of that length; else 0.

    Nor is a sequence cut that has no target in its first tokens, or of a model that takes one length alone.
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
        part(problem, Cut(1, min(SHORTEST, length))).loss_value()
    except (CurvescopeError, RuntimeError, ValueError, IndexError):
        return False
    return True


# ------------------------------------------------------------------------------------------------------ meter


STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@final
class Meter:
    """Bytes on one device; where a peak cannot be forgotten (not Linux), it is that of the whole process."""

    def __init__(self, device: torch.device):
        self._device = device

    def begin(self) -> int:
        """Bytes in use when nothing is left over; the peak counts from here."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        with suppress(OSError, AttributeError):  # another system
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory that is reused would hide what is needed
            FORGET.write_text("5", encoding="ascii")
        return self.now()

    def now(self) -> int:
        """Bytes in use."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _status("VmRSS")

    def peak(self) -> int:
        """Most bytes in use since `begin`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status("VmHWM")

    def free(self) -> int:
        """Bytes that could be taken now."""
        return free_bytes(self._device)


def _status(field: str) -> int:
    """A number of bytes in this process's status; elsewhere than on Linux its peak."""
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

CALLS = 4  # of a kind, where they are quick
LEAST = 2  # the first builds, the second is as in an algorithm
PASSED = 2  # vectors that are an algorithm's own: what is multiplied, and the product
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
    passing: int  # bytes beyond those, and beyond what is multiplied and the product, while it is taken
    opening: float = 0.0  # seconds until the first product, whatever the data are: the model is looked at


@final
class Bench:
    """Products on a part of the first batch."""

    def __init__(self, problem: Problem, cfg: ModelOnData, meter: Meter, clock: Clock, cut: Cut):
        self.problem, self.cut = part(problem, cut), cut
        self._cfg, self._meter, self._clock = cfg, meter, clock
        self._operators: dict[str, CurvatureOperator] = {}  # their blocks share what they keep, as in studies
        self.fast, self.attends, self.why = False, False, ""

    def take(self, kind: Kind, calls: int = CALLS, *, patience: float = 0.0) -> Taken:
        """LEAST products, and while there is patience CALLS or more."""
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
        del product  # and the columns with it: they pass
        after = self._meter.begin()
        self.fast, self.attends, self.why = op.engine.name == "fast", op.engine.attends, op.engine.why
        frozen = statistics.median(seconds[len(seconds) // 2 :])
        return Taken(
            frozen / kind.columns,
            max(sum(seconds) - frozen * len(seconds), 0.0),
            max(after - before, 0),
            max(peak - after - PASSED * size, 0),
            opened - sum(seconds),
        )

    def let_go(self) -> None:
        """Free what operators keep."""
        self._operators.clear()

    def _product(self, kind: Kind) -> tuple[CurvatureOperator, Callable[[], Any], int]:
        """The operator, a call that is done when a card has done it, and the bytes of its columns."""
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
            return op, lambda: sum(float(found.sum()) for found in sources.products(V).values()), V.nbytes
        return op, lambda: float((op @ V).sum()), V.nbytes

    def _operator(self, name: str) -> CurvatureOperator:
        if name not in self._operators:
            how: Any = {"engine": self._cfg.engine, "checkpoint": self._cfg.checkpoint}
            self._operators[name] = OPERATORS[name](self.problem, **how)
        return self._operators[name]


# ---------------------------------------------------------------------------------------------------- measure

PATIENCE = 4.0  # seconds for all kinds together, about, and as much again where they are quick
LONGER, LONGEST = 2, 4  # times the shortest part, for the first kind where the others are measured on that
SLOW = 0.5  # seconds of a product on it: then what is LIKE another is not measured
LIKE = {"functional": "hessian", "source": "sources"}
MOST = 2  # times that: then kinds that are like others are not measured
PILOT = 0.5  # seconds, about, for the first kind on the shortest part
ENOUGH = 20  # calls at most; a product that was asked for a dozen times is recorded and replayed
ENTRIES = 2**21  # of a vector that the work of algorithms is measured on, or all
ROWS = 8  # of a basis for that


class Around(NamedTuple):
    """Seconds of an algorithm besides products, for each entry of a vector; and for each file."""

    row: float  # to make it orthogonal to one vector of a basis
    kept: float  # to keep it for a run that is stopped
    file: float


class Point(NamedTuple):
    """A part that the first kind was measured on."""

    cut: Cut
    taken: Taken


@final
@dataclass(frozen=True)
class Measured:
    """What was measured of a problem.

    Attributes:
        taken: by kind, on the whole first batch.
        cut: the part of it that it was measured on; `everything`, all of it.
        base: bytes before any product, weights among them.
        free: bytes that could be taken then.
        fast: whether our kernels were used; `attends`, for attention; and `why` not.
    """

    taken: dict[Kind, Taken]
    around: Around
    cut: Cut
    everything: Cut
    base: int
    free: int
    fast: bool
    attends: bool
    why: str


def measure(problem: Problem, cfg: ModelOnData, asked: Mapping[Kind, int], clock: Clock) -> Measured:
    """Seconds and bytes of every kind, on as much of the first batch as there are time and memory for.

    Args:
        asked: how often a study asks for products of every kind, the most telling kind first.
    """
    meter, first = Meter(problem.device), next(iter(asked))
    check_room(problem, first, meter.free())
    everything, card = whole(problem), problem.device.type == "cuda"
    make = partial(Bench, problem, cfg, meter, clock)
    bench = make(Cut(1, everything.tokens) if card else shortest(everything))
    one = Point(bench.cut, bench.take(first, patience=PILOT))
    bench.let_go()
    base, free = meter.begin(), meter.free()  # libraries that a first product loads are there
    if one.taken.seconds > SLOW:
        asked = {kind: often for kind, often in asked.items() if kind == first or kind.name not in LIKE}
    wanted = everything if card else _affordable(problem, everything, one, list(asked), free)
    longer = _longer(everything, one, free) if wanted == one.cut != everything else None
    here = {kind: often for kind, often in asked.items() if longer is None or kind != first}
    points = {} if longer is None else {first: Point(longer, make(longer).take(first))}
    points |= _all_taken(make, here, clock, [c for c in cuts(everything) if c <= wanted])
    around, how = _around(problem, clock), (bench.fast, bench.attends, bench.why)
    grown = _grown(problem, everything, points, (one, points[first]), fused=bench.attends)
    taken = {kind: _once_for_all(kind, grown) for kind in asked if kind in grown}
    return Measured(taken, around, points[first].cut, everything, base, free, *how)


def check_room(problem: Problem, kind: Kind, free: int) -> None:
    """Raise where the vectors of one product alone do not fit: it is not begun."""
    entries = problem.space(*kind.space).size * torch.finfo(problem.dtype).bits // 8
    needed = (PASSED + 1) * kind.columns * entries  # and what it adds up, parameter by parameter
    if needed > free:
        raise CurvescopeError(
            f"no product of {problem.model.name} was measured: its vectors alone take {data_size(needed)}, "
            f"and {data_size(free)} are free",
            hint="blocks='L0.*' for fewer parameters where the study takes blocks, or several ranks",
        )


def _affordable(problem: Problem, everything: Cut, one: Point, kinds: Sequence[Kind], free: int) -> Cut:
    """The largest part on which all kinds can be measured, in time and memory."""
    least, small = one
    building = min(small.building, LEAST * small.seconds)
    seconds = sum(LEAST * kind.columns * small.seconds + building for kind in kinds)
    held = small.graph + max(kind.columns for kind in kinds) * small.passing

    def fits(cut: Cut) -> bool:
        times, data = work(problem, cut) / work(problem, least), size(cut, 0.0) / size(least, 0.0)
        return times * seconds <= PATIENCE and data * held <= free / 2

    return next(filter(fits, cuts(everything)), least)


def _all_taken(
    make: Callable[[Cut], Bench], asked: Mapping[Kind, int], clock: Clock, fits: list[Cut]
) -> dict[Kind, Point]:
    """What every kind takes on the first part, or on half of it where that does not fit after all."""
    bench, patience = make(fits[0]), PATIENCE / max(len(asked), 1)
    taken: dict[Kind, Point] = {}
    start = clock()
    try:
        for kind, often in asked.items():
            if clock() - start < MOST * PATIENCE or kind.name not in {known.name for known in taken}:
                taken[kind] = Point(bench.cut, bench.take(kind, min(often, ENOUGH), patience=patience))
        return taken
    except torch.OutOfMemoryError as error:
        half = [cut for cut in fits if size(cut, 0.0) <= size(fits[0], 0.0) / 2]
        if not half:
            raise CurvescopeError(
                f"a product of {bench.problem.model.name} on {_words(bench.cut)} takes more memory than "
                "there is",
                hint="checkpoint=True, a smaller seq_len, or more ranks",
            ) from error
    bench.let_go()
    return _all_taken(make, asked, clock, half)


def _words(cut: Cut) -> str:
    return f"{cut.tokens} tokens" if cut.tokens else "one sequence"


def _once_for_all(kind: Kind, taken: Mapping[Kind, Taken]) -> Taken:
    """What a kind takes, its graph being that which was built for any number of columns of its operator."""
    same = [some for other, some in taken.items() if other._replace(columns=kind.columns) == kind]
    building, graph = max(some.building for some in same), max(some.graph for some in same)
    return taken[kind]._replace(building=building, graph=graph)


def _longer(everything: Cut, one: Point, free: int) -> Cut | None:
    """Where all kinds are measured on the shortest part: a longer one for the first of them.

    None where sequences cannot be cut, or the memory is not there.
    """
    seconds, held = one.taken.seconds, one.taken.graph + one.taken.passing
    times = LONGEST if LEAST * LONGEST * seconds <= MOST * PATIENCE else LONGER
    cut = Cut(1, min(times * one.cut.tokens, everything.tokens))
    return cut if cut.tokens > one.cut.tokens and times * held <= free / 2 else None


def _grown(
    problem: Problem, everything: Cut, taken: Mapping[Kind, Point], ends: tuple[Point, Point], *, fused: bool
) -> dict[Kind, Taken]:
    """On a whole batch: what is kept grows as the data do, of what passes that beyond the vectors.

    Args:
        ends: a small and a large part that the first kind was measured on.
        fused: whether attention keeps no scores.
    """
    small, large = ends
    (w, t), (W, T) = ((work(problem, end.cut), end.taken.seconds) for end in ends)
    squares = scores(problem, fused=fused)
    more = large.taken.passing - small.taken.passing
    apart = size(large.cut, squares) - size(small.cut, squares)
    each = more / apart if more > 0 and apart > 0 else 0.0
    column = problem.model.num_parameters * torch.finfo(problem.dtype).bits // 8
    all_of_it = slower((w, t), (W, T), work(problem, everything)), size(everything, squares)
    found = {}
    for kind, (cut, some) in taken.items():
        here = slower((w, t), (W, T), work(problem, cut)), size(cut, squares)
        time, data = (whole / part for whole, part in zip(all_of_it, here, strict=True))
        fixed = min(some.passing, _vectors(problem, kind) * column)
        passing = fixed + data * (some.passing - fixed)
        passing = max(passing, some.passing + each * kind.columns * (all_of_it[1] - here[1]))
        grown = some.seconds * time, some.building * time, int(some.graph * data), int(passing)
        found[kind] = Taken(*grown, opening=some.opening)
    return found


def _vectors(problem: Problem, kind: Kind) -> int:
    """Vectors that pass at most while a product is taken: of all sources together, two for each."""
    each = 4 - PASSED + (2 * len(FunctionalSources(problem)) if kind.name == "sources" else 0)
    return each * kind.columns


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
