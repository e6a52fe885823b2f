"""What attention costs: time and memory of four computations, ours beside PyTorch's plain path and others.

All contenders take turns within one process, round by round, and ratios are those of a round. The length is
varied most; widths, masks and threads are varied around a middle, or all together (`full`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import at_least, setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.progress import Progress
from curvescope.models.load import as_device
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.attention.contenders import (
    COMPILED,
    CONTENDERS,
    DERIVATIVES,
    MATH,
    Derivative,
    absent,
    computation,
    draw,
)
from curvescope.studies.attention.cost import Cell, Cost, Timed
from curvescope.studies.hvp.study import timed
from curvescope.studies.preflight.measurements import Meter

Mask = Literal["none", "causal", "boolean", "additive"]
MASKS: tuple[Mask, ...] = ("none", "causal", "boolean", "additive")
TOKENS, MOST_HEADS = 8192, 16  # heads × length of short sequences, and most heads
MIDDLE = (512, 2048)  # lengths at which widths, masks and threads are varied
SAMPLE = 0.02  # seconds that one sample takes at least
SECONDS = 3.0  # of all rounds of one derivative, unless two take longer
CALLS = 4  # of each computation at least: the first, one for memory, two rounds
COMPARED = 1024  # longest sequences whose results are compared with the plain path's
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Config(BaseConfig):
    """Which sizes, whom to measure, and how long. The defaults take about five minutes on a CPU."""

    lengths: tuple[int, ...] = setting((64, 128, 256, 512, 1024, 2048, 4096, 8192), "tokens of a sequence")
    widths: tuple[int, ...] = setting((64, 32, 128), "entries of a head; the first one at every length")
    masks: tuple[str, ...] = setting(
        ("none", "causal", "boolean", "additive"), "the first two at every length"
    )
    threads: tuple[int, ...] = setting((1, 2), "on a CPU; the first number at every length")
    dtype: Literal["float32", "float64", "bfloat16"] = setting("float32", "of all tensors")
    device: str = setting("cpu", "cpu, cuda, …")
    contenders: tuple[str, ...] = setting(tuple(CONTENDERS), f"whom to measure beside the {MATH}")
    compiled_lengths: tuple[int, ...] = setting((512,), "lengths at which torch.compile is measured")
    rounds: int = setting(7, "how often each is measured at most, in turns")
    minutes: float = setting(5.0, "longer cells are left out, and named, where they would take more")
    full: bool = setting(False, "every combination of lengths, widths, masks and threads")
    seed: int = setting(0, "of all tensors")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 2, "rounds")
        choices: dict[str, list[str]] = {"contenders": [*CONTENDERS], "masks": [*MASKS]}
        for name, known in choices.items():
            for value in getattr(self, name):
                if value not in known:
                    raise UsageError(f"{name}: unknown {value!r}", hint=near_misses(value, known))
        for name in ("lengths", "widths", "threads"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise UsageError(f"{name}: expected numbers of at least 1, got {list(getattr(self, name))}")

    @property
    def chosen(self) -> tuple[str, ...]:
        """Whom to measure: the unit first."""
        return (MATH, *(name for name in self.contenders if name != MATH))


class Place(NamedTuple):
    """The inputs of one cell."""

    length: int
    width: int
    mask: str
    threads: int

    @property
    def heads(self) -> int:
        """As many as keep heads × length constant, until there is one."""
        return max(1, min(MOST_HEADS, TOKENS // self.length))

    @property
    def work(self) -> float:
        """What the time of long sequences is proportional to."""
        return self.heads * self.length**2 * (self.width + 16) / self.threads**0.5

    def __str__(self) -> str:
        words = "no mask" if self.mask == "none" else self.mask
        threads = "" if self.threads == 1 else f", {self.threads} threads"
        return f"{self.length} tokens, width {self.width}, {words}{threads}"


def places(cfg: Config) -> list[Place]:
    """The cells of a run, shortest first."""
    threads = cfg.threads if as_device(cfg.device).type == "cpu" else (1,)
    if cfg.full:
        found = {Place(*values) for values in product(cfg.lengths, cfg.widths, cfg.masks, threads)}
    else:
        width, middle = cfg.widths[0], [n for n in MIDDLE if n in cfg.lengths] or [cfg.lengths[0]]
        found = {Place(*values, threads[0]) for values in product(cfg.lengths, (width,), cfg.masks[:2])}
        found |= {Place(*values, cfg.masks[0], threads[0]) for values in product(middle, cfg.widths)}
        found |= {Place(n, width, mask, threads[0]) for n, mask in product(middle, cfg.masks)}
        found |= {Place(n, width, cfg.masks[0], t) for n, t in product(middle, threads)}
    return sorted(found, key=lambda place: (place.work, place))


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Cost:
    """Measure all cells, shortest first, until the time is up; what is left out is named."""
    device = as_device(cfg.device)
    clock = Clock(cfg.minutes * 60)
    bench = Bench(cfg, device, DTYPES[cfg.dtype], clock)
    cells = places(cfg)
    pieces = [Piece(str(place), partial(bench.cell, place)) for place in cells]
    found = work_through(pieces, progress=progress)  # times of one process only: no state
    measured = [found.take(Cell, str(place)) for place in cells]
    left = [str(place) for place, cell in zip(cells, measured, strict=True) if cell.left_out]
    return Cost(
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        cfg.dtype,
        torch.__version__,
        [timed for cell in measured for timed in cell.timed],
        left,
        notes=_notes(cfg, device, left),
    )


def _notes(cfg: Config, device: torch.device, left: list[str]) -> list[str]:
    """What a reader should know: who was not measured, and what was left out."""
    found = [why for name in cfg.chosen if (why := absent(name, device)) is not None]
    if COMPILED in cfg.chosen:
        lengths = ", ".join(map(str, cfg.compiled_lengths))
        found.append(f"{COMPILED}: measured at {lengths} tokens alone, because each shape is compiled anew")
    if left:
        found.append(f"left out, because {cfg.minutes:g} minutes were up: {'; '.join(left)}")
    if not cfg.full:
        found.append("widths, masks and threads are varied around a middle; full=true takes all combinations")
    return found


# --------------------------------------------------------------------------------------------- measuring


@dataclass
class Clock:
    """The time of a run, and what a cell of some work may take."""

    limit: float
    start: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.process_time)  # by the process before
    rates: dict[int, float] = field(default_factory=dict)  # seconds per unit of work, by length

    def has_room(self, place: Place) -> bool:
        """Whether a cell can be expected to end in time."""
        passed, used = time.monotonic() - self.start, time.process_time() - self.used
        rate = self.rates[max(self.rates)] if self.rates else 0.0
        shared = max(1.0, passed / used) if used > 1 else 1.0  # with other processes of the machine
        return CALLS * place.work * rate * shared < self.limit - passed

    def note(self, place: Place, found: list[Timed]) -> None:
        """What was measured in a cell."""
        seconds = sum(one.again for one in found if one.seconds)
        self.rates[place.length] = max(seconds / place.work, self.rates.get(place.length, 0.0))


@dataclass(frozen=True)
class Bench:
    """What the cells of a run share."""

    cfg: Config
    device: torch.device
    dtype: torch.dtype
    clock: Clock

    def cell(self, place: Place) -> Cell:
        """All derivatives of all contenders at one place."""
        if not self.clock.has_room(place):
            return Cell([], left_out=True)
        with _threads(place.threads):
            found = [one for derivative in DERIVATIVES for one in self._turns(place, derivative)]
        self.clock.note(place, found)
        return Cell(found, left_out=False)

    def _turns(self, place: Place, derivative: Derivative) -> list[Timed]:
        """Contenders in turns; every other round backwards."""
        cfg = self.cfg
        x = draw(
            place.heads, place.length, place.width, place.mask,
            seed=cfg.seed, device=self.device, dtype=self.dtype,
        )  # fmt: skip
        calls: dict[str, Callable[[], Any]] = {}
        found: dict[str, Timed] = {}
        want: list[Tensor] | None = None
        for name in cfg.chosen:
            if absent(name, self.device) or (name == COMPILED and not self._compiles(place)):
                continue
            calls[name] = computation(name, derivative, x)
            found[name], results = self._tried(place, derivative, name, calls[name])
            want = results if name == MATH and place.length <= COMPARED else want
            if want is not None and results is not None:
                found[name] = replace(found[name], error=_distance(results, want))
            del results
        able = [name for name, one in found.items() if not one.note]
        seconds: dict[str, list[float]] = {name: [] for name in able}
        slowest = sum(found[name].again for name in able)
        rounds = max(2, min(cfg.rounds, int(SECONDS / max(slowest, 1e-9))))
        repeats = {name: max(1, round(SAMPLE / max(found[name].again, 1e-9))) for name in able}
        for number in range(rounds):
            for name in reversed(able) if number % 2 else able:
                call, times = calls[name], repeats[name]
                seconds[name].append(sum(self._timed(call, place) for _ in range(times)) / times)
        unit = seconds.get(MATH, [])
        return [
            replace(one, seconds=seconds.get(name, []), unit=unit if name in seconds else [])
            for name, one in found.items()
        ]

    def _timed(self, call: Callable[[], Any], place: Place) -> float:
        """Seconds of a call; with one thread of a CPU the process's own, which others do not make longer."""
        if self.device.type != "cpu" or place.threads > 1:
            return timed(call, self.device)
        start = time.process_time()
        found = call()
        seconds = time.process_time() - start
        del found
        return seconds

    def _compiles(self, place: Place) -> bool:
        cfg = self.cfg
        first = (cfg.widths[0], cfg.masks[0], cfg.threads[0])
        return place.length in cfg.compiled_lengths and (cfg.full or place[1:] == first)

    def _tried(
        self, place: Place, derivative: Derivative, name: str, call: Callable[[], Any]
    ) -> tuple[Timed, list[Tensor] | None]:
        """The first call, which compiles, then one whose memory is measured, and the results of that."""
        empty = Timed(*place, place.heads, derivative, name)
        if name == COMPILED:
            torch.compiler.reset()
        meter = Meter(self.device)
        try:
            first = self._timed(call, place)
            before = meter.begin()
            results: list[Tensor] = []
            again = self._timed(lambda: results.extend(call()), place)
            peak = float(meter.peak() - before)
        except Exception as error:  # what one cannot do is a line of the table, and the others are measured
            return replace(empty, note=_words(error)), None
        return replace(empty, first=first, again=again, peak=peak), results


def _words(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).partition(" because ")[0][:160]


def _distance(found: list[Tensor], want: list[Tensor]) -> float:
    """‖found − want‖ / ‖want‖ over all results."""
    gap = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, want, strict=True))
    return (gap / sum(float(b.double().square().sum()) for b in want)) ** 0.5


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """torch computes with so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
