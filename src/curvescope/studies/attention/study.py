"""Time and memory of four computations with attention: ours, PyTorch's math path, and others.

All contenders take turns within one process, and each ratio compares times of the same round. The study
varies mainly the length; it varies widths, masks and threads around a middle setting, or in all combinations
(`full`).
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
from curvescope.core.config import setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.progress import Progress
from curvescope.models.load import as_device
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.studies.attention.contenders import (
    COMPILED,
    CONTENDERS,
    DERIVATIVES,
    MATH,
    Derivative,
    Inputs,
    absent,
    allowed,
    computation,
    draw,
)
from curvescope.studies.attention.cost import AttentionCell, Cost, Timed
from curvescope.studies.hvp.study import timed
from curvescope.studies.preflight.measurements import MemoryMeter

Mask = Literal["none", "causal", "boolean", "additive"]
MASKS: tuple[Mask, ...] = ("none", "causal", "boolean", "additive")
MIDDLE = (512, 2048)  # lengths at which widths, masks and threads are varied
SAMPLE = 0.02  # minimum seconds of one sample
SECONDS = 3.0  # seconds for all rounds of one derivative, unless two rounds take longer
CALLS = 4  # minimum calls of each computation: the first, one for memory, two rounds
COMPARED = 1024  # longest sequences whose results are compared with the math path's
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Config(BaseConfig):
    """Sizes, contenders and time. The defaults take about five minutes on a CPU."""

    lengths: tuple[int, ...] = setting(
        (64, 128, 256, 512, 1024, 2048, 4096, 8192), "sequence lengths in tokens"
    )
    widths: tuple[int, ...] = setting((64, 32, 128), "head widths; the first one is measured at every length")
    masks: tuple[str, ...] = setting(
        ("none", "causal", "boolean", "additive"), "masks; the first two are measured at every length"
    )
    threads: tuple[int, ...] = setting((1, 2), "CPU threads; the first number is used at every length")
    dtype: Literal["float32", "float64", "bfloat16"] = setting("float32", "data type of all tensors")
    device: str = setting("cpu", "cpu, cuda, …")
    contenders: tuple[str, ...] = setting(tuple(CONTENDERS), f"implementations to compare with the {MATH}")
    compiled_lengths: tuple[int, ...] = setting((512,), "lengths at which torch.compile is measured")
    tokens: int = setting(8192, "heads × length of long sequences")
    most_heads: int = setting(16, "maximum number of heads, for short sequences")
    rounds: int = setting(7, "maximum number of interleaved rounds", least=2)
    minutes: float = setting(5.0, "time limit; the result names the cells that it left out")
    full: bool = setting(False, "every combination of lengths, widths, masks and threads")
    seed: int = setting(0, "seed of all tensors")

    def __post_init__(self) -> None:
        super().__post_init__()
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
        """Contenders to measure, the math path first."""
        return (MATH, *(name for name in self.contenders if name != MATH))


class CellShape(NamedTuple):
    """Shape, mask and threads of one cell."""

    length: int
    width: int
    mask: str
    threads: int
    heads: int

    @property
    def work(self) -> float:
        """Work: the time of long sequences is proportional to it."""
        return self.heads * self.length**2 * (self.width + 16) / self.threads**0.5

    def __str__(self) -> str:
        words = "no mask" if self.mask == "none" else self.mask
        threads = "" if self.threads == 1 else f", {self.threads} threads"
        return f"{self.length} tokens, width {self.width}, {words}{threads}"


def places(cfg: Config) -> list[CellShape]:
    """Return the cells of a run, shortest first."""
    threads = cfg.threads if as_device(cfg.device).type == "cpu" else (1,)
    if cfg.full:
        found = set(product(cfg.lengths, cfg.widths, cfg.masks, threads))
    else:
        width, middle = cfg.widths[0], [n for n in MIDDLE if n in cfg.lengths] or [cfg.lengths[0]]
        found = {(*values, threads[0]) for values in product(cfg.lengths, (width,), cfg.masks[:2])}
        found |= {(*values, cfg.masks[0], threads[0]) for values in product(middle, cfg.widths)}
        found |= {(n, width, mask, threads[0]) for n, mask in product(middle, cfg.masks)}
        found |= {(n, width, cfg.masks[0], t) for n, t in product(middle, threads)}
    made = [CellShape(*one, heads=max(1, min(cfg.most_heads, cfg.tokens // one[0]))) for one in found]
    return sorted(made, key=lambda place: (place.work, place))


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Cost:
    """Measure all cells, shortest first, until the time is up; a note names the cells left out."""
    device = as_device(cfg.device)
    clock = Clock(cfg.minutes * 60)
    bench = AttentionBench(cfg, device, DTYPES[cfg.dtype], clock)
    cells = places(cfg)
    pieces = [Piece(str(place), partial(bench.cell, place)) for place in cells]
    # No state, because only times of the same process are comparable.
    found = work_through(pieces, progress=progress)
    measured = [found.take(AttentionCell, str(place)) for place in cells]
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
    """Notes for a reader: contenders that were not measured, and cells that were left out."""
    found = [why for name in cfg.chosen if (why := absent(name, device)) is not None]
    if COMPILED in cfg.chosen:
        lengths = ", ".join(map(str, cfg.compiled_lengths))
        found.append(
            f"{COMPILED}: measured at {lengths} tokens only, because torch.compile recompiles for each shape"
        )
    if left:
        found.append(f"left out because the limit of {cfg.minutes:g} minutes was reached: {'; '.join(left)}")
    if not cfg.full:
        found.append(
            "widths, masks and threads vary around a middle setting; full=true measures all combinations"
        )
    return found


# --------------------------------------------------------------------------------------------- measuring


@dataclass
class Clock:
    """Predict from the cells measured so far if another cell will end in time."""

    limit: float
    start: float = field(default_factory=time.monotonic)
    used: float = field(default_factory=time.process_time)  # process time before the run
    rates: dict[int, float] = field(default_factory=dict)  # seconds per unit of work, by length

    def has_room(self, place: CellShape) -> bool:
        """Return True if a cell will probably end in time."""
        passed, used = time.monotonic() - self.start, time.process_time() - self.used
        rate = self.rates[max(self.rates)] if self.rates else 0.0
        shared = max(1.0, passed / used) if used > 1 else 1.0  # slowdown by other processes on the machine
        return CALLS * place.work * rate * shared < self.limit - passed

    def note(self, place: CellShape, found: list[Timed]) -> None:
        """Remember the time of a cell."""
        seconds = sum(one.again for one in found if one.seconds)
        self.rates[place.length] = max(seconds / place.work, self.rates.get(place.length, 0.0))


@dataclass(frozen=True)
class AttentionBench:
    """Settings shared by the cells of a run."""

    cfg: Config
    device: torch.device
    dtype: torch.dtype
    clock: Clock

    def cell(self, place: CellShape) -> AttentionCell:
        """Measure all derivatives of all contenders for one cell."""
        if not self.clock.has_room(place):
            return AttentionCell([], left_out=True)
        x = draw(
            place.heads, place.length, place.width, place.mask,
            seed=self.cfg.seed, device=self.device, dtype=self.dtype,
        )  # fmt: skip
        with _threads(place.threads):
            found = [one for derivative in DERIVATIVES for one in self._turns(place, derivative, x)]
        self.clock.note(place, found)
        return AttentionCell(found, left_out=False)

    def _turns(self, place: CellShape, derivative: Derivative, x: Inputs) -> list[Timed]:
        """Time the contenders in turns; every other round runs in reverse order."""
        cfg = self.cfg
        calls: dict[str, Callable[[], Any]] = {}
        found: dict[str, Timed] = {}
        want: list[Tensor] | None = None
        for name in cfg.chosen:
            if absent(name, self.device) or (name == COMPILED and not self._compiles(place)):
                continue
            calls[name] = computation(name, derivative, x)
            with allowed(name):
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
                with allowed(name):
                    seconds[name].append(sum(self._timed(call, place) for _ in range(times)) / times)
        unit = seconds.get(MATH, [])
        return [
            replace(one, seconds=seconds.get(name, []), unit=unit if name in seconds else [])
            for name, one in found.items()
        ]

    def _timed(self, call: Callable[[], Any], place: CellShape) -> float:
        """Seconds of a call: process time with one CPU thread, else wall-clock time."""
        if self.device.type != "cpu" or place.threads > 1:
            return timed(call, self.device)
        start = time.process_time()
        found = call()
        seconds = time.process_time() - start
        del found
        return seconds

    def _compiles(self, place: CellShape) -> bool:
        cfg = self.cfg
        first = (cfg.widths[0], cfg.masks[0], cfg.threads[0])
        return place.length in cfg.compiled_lengths and (cfg.full or place[1:4] == first)

    def _tried(
        self, place: CellShape, derivative: Derivative, name: str, call: Callable[[], Any]
    ) -> tuple[Timed, list[Tensor] | None]:
        """Call once to compile, then again for peak memory; return the second call's results."""
        empty = Timed(*place, derivative, name)
        if name == COMPILED:
            torch.compiler.reset()
        meter = MemoryMeter(self.device)
        try:
            first = self._timed(call, place)
            before = meter.begin()
            results: list[Tensor] = []
            again = self._timed(lambda: results.extend(call()), place)
            peak = float(meter.peak() - before)
        except Exception as error:  # a failure becomes a note in the table; the others are still measured
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
    """Set the number of torch threads inside this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
