"""Cost of a Hessian-vector product: time in gradients, memory, first call, and error against float64.

All contenders use the same model and tokens in the same run: our engines and other libraries, if installed.

The package contains reference figures of the cost of products, to detect regressions.

`figures.json` has one entry for each device, model, size, tokens, precision and contender; unknown numbers
are null. A run on a device of that name is compared with it; `record` writes the figures of a run.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from curvescope.algorithms import spectral_density
from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.number_format import data_size
from curvescope.core.operator import LinearOperator
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.core.tensors import free_bytes
from curvescope.data.batches import Batch, Batches
from curvescope.engines.graph_cache import clear_all_caches
from curvescope.engines.replay.cpu import MANY, WARM
from curvescope.models.load import as_device, load
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.runs.resumable_loop import Piece, PieceStore, State, work_through
from curvescope.runs.study_result import Line, Shown, Tables
from curvescope.studies.hvp.analysis import (
    CHECKPOINTED,
    CONTENDERS,
    PACKAGES,
    SHAPES,
    ContenderProduct,
    Tree,
    build,
    distance,
    exact_product,
    few,
    gradient,
    matrix_of,
    own_gradient,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

nan = math.nan
GIB = 2**30
Ratio = tuple[float, float, float]
"""Median, minimum, maximum."""


@dataclass(frozen=True)
class Columns(Result):
    """Repeated products with several columns at once."""

    number: int
    seconds: list[float]  # one per round, of all columns
    unit: list[float]  # seconds of a gradient in the same rounds
    peak: float  # peak bytes

    def ratio(self) -> Ratio:
        """Time of one column, in gradients."""
        return ratio_per_round([s / self.number for s in self.seconds], self.unit)


@dataclass(frozen=True)
class Measured(Result):
    """Measurements of one contender."""

    name: str
    seconds: list[float]  # one per round
    # Seconds of a gradient in the same rounds; for large models, the median measured before.
    unit: list[float]
    first: float  # seconds of the first call: building or compiling, and one product
    peak: float  # peak bytes after the first product, in total; nan if unknown (CPU)
    error: float  # ‖Hv − exact‖ / ‖exact‖ on a small batch, exact in float64; nan for the gradient
    note: str = ""  # reason for missing numbers
    frozen: list[float] = field(default_factory=list)  # like `seconds`, inside `with operator.frozen()`
    frozen_unit: list[float] = field(default_factory=list)
    first_peak: float = nan  # like `peak`, during the first product
    error_on: str = "the model"  # model on which the error was measured
    columns: list[Columns] = field(default_factory=list)

    def ratio(self) -> Ratio:
        """Time in gradients, per round."""
        return ratio_per_round(self.seconds, self.unit)

    def frozen_ratio(self) -> Ratio:
        """Time in gradients of repeated products; nan for other libraries."""
        return ratio_per_round(self.frozen, self.frozen_unit)

    def line(self) -> Line:
        """Return the time in gradients, and a description of the rest."""
        if not self.seconds:
            return (self.name, "–", self.note)
        median, low, high = self.ratio()
        seconds = f"{statistics.median(self.seconds):.3g} s"
        words = [f"{low:.2f} to {high:.2f} gradients", seconds] if median == median else []
        words += [f"frozen {self.frozen_ratio()[0]:.2f}"] if self.frozen else []
        words += [f"{c.number} columns {c.ratio()[0]:.2f} each" for c in self.columns]
        words += [f"first call {self.first:.1f} s"]
        if self.peak == self.peak:
            words += [f"peak {self.peak / GIB:.1f} GiB, at first {self.first_peak / GIB:.1f}"]
        words += [f"error {self.error:.1e}"] if self.error == self.error else []
        words += [self.note] if self.note else []
        return (self.name, f"{median:.2f}×" if median == median else seconds, ", ".join(words))

    def row(self) -> dict[str, Any]:
        """Return a row of the table."""
        median, low, high = self.ratio()
        return {
            "contender": self.name,
            "gradients": median,
            "low": low,
            "high": high,
            "frozen": self.frozen_ratio()[0],
            "seconds": statistics.median(self.seconds) if self.seconds else nan,
            "first_s": self.first,
            "first_peak_GiB": self.first_peak / GIB,
            "peak_GiB": self.peak / GIB,
            "error": self.error,
            "error_on": self.error_on if self.error == self.error else "",
            "note": self.note,
        }


@dataclass(frozen=True)
class Committed(Result):
    """Committed figures of one contender on this device; nan if there are none."""

    contender: str
    gradients: float
    frozen: float
    peak_GiB: float
    seconds: float
    torch: str


@dataclass(frozen=True)
class Cost(Shown):
    """Measurements of all contenders, on one model and batch."""

    model: str
    device: str
    num_parameters: int
    tokens: str
    tf32: bool
    measured: list[Measured] = field(default_factory=list)
    slq_seconds: float = nan
    vector: float = nan  # bytes of one parameter vector, a unit for peaks
    committed: list[Committed] = field(default_factory=list)

    def of(self, name: str) -> Measured:
        """Return the contender of that name."""
        return next(m for m in self.measured if m.name == name)

    def ratio(self, name: str) -> Ratio:
        """Time in gradients, per round: median, minimum, maximum."""
        return self.of(name).ratio()

    def summary(self) -> list[Line]:
        """Return a line per contender: time in gradients, a description, and the committed figures."""
        where = f"{self.num_parameters:,} parameters, {self.tokens} on {self.device}"
        where += f", a vector {self.vector / GIB:.3g} GiB" if self.vector == self.vector else ""
        lines = [("model", self.model, where)]
        known = {c.contender: c for c in self.committed}
        for m in self.measured:
            label, value, words = m.line()
            if m.seconds and m.name in known:
                words = f"{words}; {_said(known[m.name])}"
            lines.append((label, value, words))
        if self.slq_seconds == self.slq_seconds:
            lines.append(("SLQ 10 × 100", f"{self.slq_seconds:.0f} s", "density of the Hessian"))
        return lines

    def captions(self) -> dict[str, str]:
        """Return captions of the figure and the tables."""
        where = f"{self.model}, {self.tokens}, {self.device}{', TF32' if self.tf32 else ''}"
        return {
            "cost": f"Time of one product in units of one gradient ({where}); the bar is the median over "
            "rounds, the line the range. Steady: inside an algorithm, which checks the stored state once "
            "for all products. Columns: time of each column in a product with several columns.",
            "costs": "Error: distance to the product in float64, on a small batch of the model in error_on. "
            "Peaks (GPU only) are the total allocated memory, during the first product and after it; "
            "vector_GiB is one parameter vector.",
            "columns": "Repeated products with several columns at once: time of each column, in gradients.",
        }

    def tables(self) -> Tables:
        """Return one row per contender, and one per number of columns."""
        known = {c.contender: c for c in self.committed}
        rows = [m.row() | {"vector_GiB": self.vector / GIB} for m in self.measured]
        if known:
            beside = (_beside(known.get(m.name)) for m in self.measured)
            rows = [row | more for row, more in zip(rows, beside, strict=True)]
        if all(m.peak != m.peak for m in self.measured):  # on a CPU
            rows = [{k: x for k, x in row.items() if not k.endswith("peak_GiB")} for row in rows]
        found = {"costs": rows}
        several = [_several(m.name, c) for m in self.measured for c in m.columns]
        return found | ({"columns": several} if several else {})

    def figures(self) -> dict[str, Figure]:
        """Draw bars of time, and of memory if known."""
        from curvescope.viz.estimates import bars

        rows: list[tuple[str, Ratio, float]] = []
        for m in self.measured:
            if not m.seconds:
                continue
            rows.append((m.name, m.ratio(), m.peak))
            rows += [(f"{m.name}, frozen", m.frozen_ratio(), nan)] if m.frozen else []
            rows += [(f"{m.name}, {c.number} columns, each", c.ratio(), c.peak) for c in m.columns]
        names, ratios, peaks = zip(*rows, strict=True) if rows else ((), (), ())
        known = any(peak == peak for peak in peaks)
        return {"cost": bars(names, ratios, [peak / GIB for peak in peaks] if known else None)}


def ratio_per_round(seconds: Sequence[float], unit: Sequence[float]) -> Ratio:
    """Median, minimum and maximum of the ratios per round; nan if there is no unit."""
    found = [a / b for a, b in zip(seconds, unit, strict=True)] if unit else []
    return (statistics.median(found), min(found), max(found)) if found else (nan, nan, nan)


def _said(known: Committed) -> str:
    """Describe the committed figures."""
    words = [f"{known.gradients:.2f}×"]
    words += [f"frozen {known.frozen:.2f}"] if known.frozen == known.frozen else []
    words += [f"{known.peak_GiB:.1f} GiB"] if known.peak_GiB == known.peak_GiB else []
    return f"committed: {', '.join(words)}"


def _beside(known: Committed | None) -> dict[str, float]:
    """Table columns of the committed figures."""
    return {
        "committed_gradients": known.gradients if known else nan,
        "committed_peak_GiB": known.peak_GiB if known else nan,
    }


def _several(name: str, columns: Columns) -> dict[str, Any]:
    median, low, high = columns.ratio()
    return {
        "contender": name,
        "columns": columns.number,
        "gradients_each": median,
        "low": low,
        "high": high,
        "seconds": statistics.median(columns.seconds),
        "peak_GiB": columns.peak / GIB,
    }


# ---------------------------------------------------------------------------------------------------- measure

LARGE = 200e6  # parameters; larger models use no float64 and no two gradients at once
OFF = "off by more than rounding"
LAYERS = 2  # layers of the model for errors of large models
PATIENCE = 15.0  # maximum seconds of warm-up


@dataclass(frozen=True)
class ProductBench:
    """Model and batch, with shared references: the unit of time for large models, and products in float64.

    Args:
        shallow: function that builds the model of the same shape with few layers.
        own: use `Problem.gradient` as the unit, because an eager gradient in float32 does not fit.
    """

    module: nn.Module
    x: Tensor
    y: Tensor
    shallow: Callable[[], nn.Module]
    own: bool
    rounds: int
    columns: tuple[int, ...]
    seed: int
    units: list[float] = field(default_factory=list)  # unit of a large model, measured before
    exact: dict[str, Tree] = field(default_factory=dict)  # exact products of a model that is not large

    @property
    def large(self) -> bool:
        """Return True if the unit is measured separately, and errors on a model with few layers."""
        return num_parameters(self.module) > LARGE

    @property
    def _rounding(self) -> float:
        """Tolerance for rounding; a larger error is a fault of the contender."""
        high = torch.get_float32_matmul_precision() == "highest" or self.x.device.type == "cpu"
        return 1e-4 if high and not self.own else 0.05

    def unit(self) -> ContenderProduct:
        """Return the gradient as a product."""
        return (own_gradient if self.own else gradient)(self.module, self.x, self.y)

    def measured(self, name: str) -> Measured:
        """Measure one contender, or return the reason for missing numbers; frees its memory."""
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            return _failed(name, f"{PACKAGES[name]} is not installed")
        clean()
        try:
            found = self._timed(name)
        except Exception as error:  # a failure of one contender does not stop the others
            return _failed(name, _words(error))
        if name == "gradient":
            self.units.extend([statistics.median(found.seconds)] * self.rounds if self.large else [])
            return found
        clean()
        try:
            error = self._error(name)
            return replace(found, error=error, note=OFF if error > self._rounding else "")
        except Exception as error:
            return replace(found, note=f"its error was not measured: {_words(error)}")

    def _timed(self, name: str) -> Measured:
        """Measure times and memory; only the first product builds or compiles."""
        device = self.x.device
        product = self.unit() if name == "gradient" else CONTENDERS[name](self.module, self.x, self.y)
        given = None if name == "gradient" else product.enter(draw(self.module, self.seed))
        reset_peak(device)
        first = timed(lambda: product.times(given), device)
        first_peak = peak(device)
        reset_peak(device)
        on_cpu = product.operator is not None and device.type == "cpu"
        _warm(lambda: product.times(given), device, WARM + 2 if on_cpu else 3)
        most = peak(device)
        seconds, unit = self._rounds(lambda: product.times(given), alone=name == "gradient")
        found = Measured(name, seconds, unit, first, most, nan, first_peak=first_peak)
        found = replace(found, error_on=f"{LAYERS} layers" if self.large else "the model")
        if product.operator is None:
            return found
        with product.operator.frozen():
            frozen, frozen_unit = self._rounds(lambda: product.times(given))
        given = None  # free its memory
        several = [self._columns(product.operator, k) for k in self.columns if k > 1]
        return replace(found, frozen=frozen, frozen_unit=frozen_unit, columns=several)

    def _rounds(self, call: Callable[[], Any], *, alone: bool = False) -> tuple[list[float], list[float]]:
        """Seconds of a call per round, and of a gradient in the same round or measured before."""
        device = self.x.device
        if self.large:
            seconds = [timed(call, device) for _ in range(self.rounds)]
            return seconds, list(seconds) if alone else list(self.units)
        unit = self.unit()
        pairs = [(timed(call, device), timed(lambda: unit.times(None), device)) for _ in range(self.rounds)]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def _columns(self, operator: LinearOperator, k: int) -> Columns:
        """Measure repeated products with k columns."""
        device, source = self.x.device, generator(self.seed, 3, device=self.x.device)
        V = torch.randn(operator.shape[1], k, generator=source, device=device, dtype=operator.dtype)
        reset_peak(device)
        with operator.frozen():
            _warm(lambda: operator @ V, device, MANY // k + 2 if device.type == "cpu" else 3)
            most = peak(device)
            seconds, unit = self._rounds(lambda: operator @ V)
        return Columns(k, seconds, unit, most)

    def _error(self, name: str) -> float:
        """Error against float64 on the small batch; large models use few layers, one product at a time."""
        module = self.shallow() if self.large else self.module
        x, y, v = few(self.x), few(self.y), draw(module, self.seed)
        matrix = matrix_of(name)
        want = self.exact.get(matrix)
        if want is None:
            want = exact_product(matrix, module, x, y, v)
            if not self.large:
                self.exact[matrix] = want
            clean()
        return distance(name, module, x, y, v, want)


def num_parameters(module: nn.Module) -> int:
    """Number of weights; shared weights count once."""
    return sum(p.numel() for p in module.parameters())


def draw(module: nn.Module, seed: int) -> Tree:
    """Draw a Gaussian direction in float32 on the CPU, or on the device of the weights if there are many."""
    params = list(module.parameters())
    place = params[0].device if num_parameters(module) > LARGE else torch.device("cpu")
    source = generator(seed, 2, device=place)
    dtypes = [torch.float32 if p.dtype == torch.bfloat16 else p.dtype for p in params]
    return [
        torch.randn(p.shape, generator=source, device=place).to(p.device, dtype)
        for p, dtype in zip(params, dtypes, strict=True)
    ]


def _failed(name: str, why: str) -> Measured:
    return Measured(name, [], [], nan, nan, nan, why)


def _words(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).splitlines() or [type(error).__name__]
    return f"failed: {lines[0][:160]}"


def _warm(call: Callable[[], Any], device: torch.device, calls: int) -> None:
    """Run warm-up products until recording is complete; only two if they take long."""
    start = time.monotonic()
    for number in range(calls):
        if number > 1 and time.monotonic() - start > PATIENCE:
            return
        timed(call, device)


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, including the work on the device."""
    _wait(device)
    start = time.perf_counter()
    found = call()
    _wait(device)
    seconds = time.perf_counter() - start
    del found
    return seconds


def clean() -> None:
    """Free caches of the engines, reference cycles, and cached memory of the allocator."""
    clear_all_caches()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> float:
    """Peak allocated bytes; nan if unknown."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else nan


@contextmanager
def precision(*, tf32: bool) -> Iterator[None]:
    """Compute matrix products in TF32 or in full float32 inside this context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# -------------------------------------------------------------------------------------------------- committed

FILE = Path(__file__).with_name("figures.json")
MARGIN, CPU_MARGIN = 0.10, 0.25  # CPU frequencies vary, and different CPUs share the name
KEYS = ("device", "model", "size", "tokens", "tf32", "contender")
NUMBERS = ("gradients", "frozen", "peak_GiB", "seconds")
Entry = dict[str, Any]


def read(path: Path = FILE) -> list[Entry]:
    """Read all entries; none if there is no file."""
    return json.loads(path.read_text(encoding="utf-8"))["entries"] if path.exists() else []


def known(cost: Cost, path: Path = FILE) -> list[Committed]:
    """Return the committed figures for the contenders of a run, on the same device and work."""
    entries = {_key(entry): entry for entry in read(path)}
    found = [entries.get(_key(entry)) for entry in _entries(cost, "")]
    return [
        Committed(e["contender"], torch=e["torch"] or "", **{name: _number(e[name]) for name in NUMBERS})
        for e in found
        if e
    ]


def record(cost: Cost, torch_version: str, path: Path = FILE) -> int:
    """Write the figures of a run, replace old entries, append new ones, and return their number."""
    mine = [entry for entry in _entries(cost, torch_version) if entry["seconds"] is not None]
    entries = {_key(entry): entry for entry in (*read(path), *mine)}
    lines = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in entries.values())
    path.write_text(f'{{"schema": 1, "entries": [\n{lines}\n]}}\n', encoding="utf-8")
    return len(mine)


def compared(cost: Cost) -> list[str]:
    """Return a sentence for each figure that exceeds the committed one by more than the margin."""
    on_cpu = cost.device == "cpu"
    margin = CPU_MARGIN if on_cpu else MARGIN
    found = []
    for then in cost.committed:
        m = cost.of(then.contender)
        pairs = [("gradients", m.ratio()[0], then.gradients)]
        pairs += [("gradients, frozen", m.frozen_ratio()[0], then.frozen)]
        pairs += [] if on_cpu else [("GiB", m.peak / GIB, then.peak_GiB)]
        for unit, now, before in pairs:
            if now > before * (1 + margin):  # false if one of them is nan
                worse = f"{100 * (now / before - 1):.0f} % more than the committed {before:.2f}"
                version = f" (torch {then.torch})" if then.torch else ""
                found.append(f"{m.name} takes {now:.2f} {unit}, {worse}{version}")
    return found


def _entries(cost: Cost, torch_version: str) -> list[Entry]:
    model, size = cost.model.split(" ", 1)
    work = (cost.device, model, size, cost.tokens.removesuffix(" tokens"), cost.tf32)
    return [
        dict(zip(KEYS, (*work, m.name), strict=True)) | _figures(m) | {"torch": torch_version}
        for m in cost.measured
    ]


def _figures(m: Measured) -> Entry:
    seconds = statistics.median(m.seconds) if m.seconds else math.nan
    values = (m.ratio()[0], m.frozen_ratio()[0], m.peak / GIB, seconds)
    return {
        name: float(f"{value:.4g}") if value == value else None
        for name, value in zip(NUMBERS, values, strict=True)
    }


def _key(entry: Entry) -> tuple[Any, ...]:
    return tuple(entry[name] for name in KEYS)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


LOG = logging.getLogger("curvescope")
DEFAULT = ("gradient", "hessian", "ggn", "functional", "hessian autograd", "eigenthings", "curvlinops")


@dataclass(frozen=True)
class Config(BaseConfig):
    """Model, batch and contenders. The defaults take about a minute on a CPU."""

    model: Literal["gpt2", "llama", "neox", "encoder"] = setting(
        "gpt2", "architecture, with random weights; encoder: torch's nn.TransformerEncoder"
    )
    size: Literal["small", "124M", "350M", "1.5B", "8B"] = setting(
        "small", "number of parameters: a million, GPT-2 and two larger ones, or Llama 3 8B"
    )
    batch_size: int = setting(8, "sequences")
    seq_len: int = setting(128, "tokens of each sequence")
    device: str = setting("cpu", "cpu, cuda, …")
    tf32: bool = setting(False, "use TF32 for matrix products")
    contenders: tuple[str, ...] = setting(
        DEFAULT, f"some of {', '.join(CONTENDERS)}; for 8B only ours with checkpoint"
    )
    rounds: int = setting(7, "number of rounds, each with a gradient and every contender")
    slq: bool = setting(False, "also time a full job: a density with 10 probes × 100 steps")
    seed: int = setting(0, "seed of weights, tokens and directions")
    columns: tuple[int, ...] = setting((1,), "numbers of columns per product, measured for our contenders")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.contenders:
            if name not in CONTENDERS:
                raise UsageError(f"unknown contender {name!r}", hint=near_misses(name, list(CONTENDERS)))
        for setting_, count in (("batch_size", self.batch_size), ("seq_len", self.seq_len)):
            if count < 1:
                raise UsageError(f"{setting_}: expected at least 1, got {count}")
        if not self.columns or min(self.columns) < 1:
            raise UsageError(f"columns: expected numbers of at least 1, got {list(self.columns)}")
        if self.size == "8B" and self.model != "llama":
            raise UsageError(f"the size 8B needs the model llama, got {self.model!r}", hint="model=llama")
        wrong = [name for name in self.chosen if self.size == "8B" and name not in CHECKPOINTED]
        if wrong:
            raise UsageError(
                f"the size 8B supports only {' and '.join(map(repr, CHECKPOINTED))}, got {wrong[0]!r}"
            )

    @property
    def chosen(self) -> tuple[str, ...]:
        """Contenders to measure besides the gradient; by default those that fit."""
        given = CHECKPOINTED if self.size == "8B" and self.contenders == DEFAULT else self.contenders
        return tuple(name for name in given if name != "gradient")


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Cost:
    """Measure the contenders, one at a time, each against a gradient of the same rounds.

    For models with more than 200 M parameters, the gradient is measured before the others, and errors are
    measured on a model of the same shape with two layers. Each result is reported when it is measured.
    """
    device = as_device(cfg.device)
    _check_room(cfg, device)
    make = partial(build, cfg.model, cfg.size, max(cfg.seq_len, 1024), seed=cfg.seed, device=device)
    module, shape = make(), (cfg.batch_size, cfg.seq_len)
    x, y = (_tokens(SHAPES[cfg.size][3], shape, cfg.seed, i).to(device) for i in (0, 1))
    shallow = partial(make, layers=LAYERS)
    bench = ProductBench(module, x, y, shallow, cfg.size == "8B", cfg.rounds, cfg.columns, cfg.seed)
    names = ("gradient", *cfg.chosen)
    with precision(tf32=cfg.tf32):
        pieces = [Piece(name, partial(_measured, bench, name, state)) for name in names]
        # No state, because only times of the same process are comparable.
        found = work_through(pieces, progress=progress)
        clean()
        slq = _slq(module, x, y, cfg.seed) if cfg.slq else math.nan
    cost = Cost(
        f"{cfg.model} {cfg.size}",
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        num_parameters(module),
        f"{cfg.batch_size} × {cfg.seq_len} tokens",
        cfg.tf32,
        [found.take(Measured, name) for name in names],
        slq,
        4.0 * num_parameters(module),
    )
    return _beside_committed(cost, state)


def _check_room(cfg: Config, device: torch.device) -> None:
    """Raise if weights, a direction, a product and a gradient do not fit into memory."""
    n = sum(p.numel() for p in build(cfg.model, cfg.size, max(cfg.seq_len, 1024), device="meta").parameters())
    needed, free = n * (14 if cfg.size == "8B" else 16), free_bytes(device)
    if needed > free:
        raise UsageError(
            f"the size {cfg.size} needs at least {data_size(needed)} of memory on {device.type}, but "
            f"only {data_size(free)} are free",
            hint="use a smaller size or another device",
        )


def _tokens(vocabulary: int, shape: tuple[int, int], seed: int, stream: int) -> Tensor:
    return torch.randint(vocabulary, shape, generator=generator(seed, stream))


def _measured(bench: ProductBench, name: str, state: State | None) -> Measured:
    found = bench.measured(name)
    if isinstance(state, PieceStore):
        state.tell("  ".join(part for part in found.line() if part))
    return found


def _beside_committed(cost: Cost, state: State | None) -> Cost:
    """Add the committed figures for this device to the result, and report regressions."""
    cost = replace(cost, committed=known(cost))
    worse = compared(cost)
    for line in worse if cost.device != "cpu" else []:  # on a CPU only a note
        if isinstance(state, PieceStore):
            state.warn(line)
        else:
            LOG.warning("%s", line)
    return replace(cost, notes=worse)


def _slq(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> float:
    """Seconds of a density of the Hessian with 10 probes × 100 steps, in total."""
    H = Hessian(Problem(load(module), Batches([Batch(x, y)])), engine="fast")
    bases = 1.1 * 101 * H.shape[0] * 4 / 2**30  # GiB of the Lanczos basis of one probe
    return timed(
        lambda: spectral_density(H, num_probes=10, num_steps=100, seed=seed, max_gib=max(8, bases)), x.device
    )
