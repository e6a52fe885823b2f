"""What a product takes on this device: seconds and bytes, measured on a part of the first batch.

A product goes through the batches one after the other, so the first batch stands for all. On a CPU a product
on the first tokens of one sequence says how much of the batch can be measured in PATIENCE, in half of the
memory; from there to the whole batch it is reckoned as `cut` says. A card is measured on all of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch

from curvescope.algorithms.vectors import orthogonalize
from curvescope.core.errors import CurvescopeError
from curvescope.core.numbers import data_size
from curvescope.core.operator import Identity
from curvescope.operators.sources import FunctionalSources
from curvescope.problem import Problem
from curvescope.runs.disk.journal import Journal
from curvescope.studies.preflight.bench import LEAST, PASSED, Bench, Clock, Kind, Taken
from curvescope.studies.preflight.cut import Cut, cuts, scores, shortest, size, slower, whole, work
from curvescope.studies.preflight.meter import Meter
from curvescope.studies.setting import ModelOnData

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
