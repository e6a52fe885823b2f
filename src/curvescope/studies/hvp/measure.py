"""How one contender is measured: the first product, products after it, in a row, with several columns."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from curvescope.core.operator import LinearOperator
from curvescope.core.seeds import generator
from curvescope.engines.graph_cache import forget_everything
from curvescope.engines.replay.cpu import MANY, WARM
from curvescope.studies.hvp.contenders import CONTENDERS, PACKAGES, Product, Tree, gradient, own_gradient
from curvescope.studies.hvp.costs import Columns, Measured
from curvescope.studies.hvp.exact import distance, exact_product, few, matrix_of

LARGE = 200e6  # parameters from which nothing is done on the whole model that takes float64 or two gradients
OFF = "off by more than rounding"
LAYERS = 2  # of the model that errors of large ones are measured on
PATIENCE = 15.0  # seconds of products before those that count, at most
nan = math.nan


@dataclass(frozen=True)
class Bench:
    """A model and a batch, and what contenders share: the unit of large models, products in float64.

    Args:
        shallow: makes the model of the same shape with few layers.
        own: whether the unit is `Problem.gradient`, because an eager gradient in float32 does not fit.
    """

    module: nn.Module
    x: Tensor
    y: Tensor
    shallow: Callable[[], nn.Module]
    own: bool
    rounds: int
    columns: tuple[int, ...]
    seed: int
    units: list[float] = field(default_factory=list)  # of a large model, measured before
    exact: dict[str, Tree] = field(default_factory=dict)  # of a model that is not large

    @property
    def large(self) -> bool:
        """Whether the unit is measured apart, and errors on a model with few layers."""
        return num_parameters(self.module) > LARGE

    @property
    def _rounding(self) -> float:
        """What rounding may leave of a product; more is a mistake of the one who makes it."""
        high = torch.get_float32_matmul_precision() == "highest" or self.x.device.type == "cpu"
        return 1e-4 if high and not self.own else 0.05

    def unit(self) -> Product:
        """The gradient."""
        return (own_gradient if self.own else gradient)(self.module, self.x, self.y)

    def measured(self, name: str) -> Measured:
        """One contender, or why there are no numbers of it; nothing of it is left in memory."""
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            return _failed(name, f"{PACKAGES[name]} is not installed")
        clean()
        try:
            found = self._timed(name)
        except Exception as error:  # whatever one does, the others are measured
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
        """Times and memory; the first product is the only one that builds or compiles."""
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
        given = None  # its memory
        several = [self._columns(product.operator, k) for k in self.columns if k > 1]
        return replace(found, frozen=frozen, frozen_unit=frozen_unit, columns=several)

    def _rounds(self, call: Callable[[], Any], *, alone: bool = False) -> tuple[list[float], list[float]]:
        """Seconds of a call, round by round, and of a gradient next to each, or of those before."""
        device = self.x.device
        if self.large:
            seconds = [timed(call, device) for _ in range(self.rounds)]
            return seconds, list(seconds) if alone else list(self.units)
        unit = self.unit()
        pairs = [(timed(call, device), timed(lambda: unit.times(None), device)) for _ in range(self.rounds)]
        return [a for a, _ in pairs], [b for _, b in pairs]

    def _columns(self, operator: LinearOperator, k: int) -> Columns:
        """Products with k columns, in a row."""
        device, source = self.x.device, generator(self.seed, 3, device=self.x.device)
        V = torch.randn(operator.shape[1], k, generator=source, device=device, dtype=operator.dtype)
        reset_peak(device)
        with operator.frozen():
            _warm(lambda: operator @ V, device, MANY // k + 2 if device.type == "cpu" else 3)
            most = peak(device)
            seconds, unit = self._rounds(lambda: operator @ V)
        return Columns(k, seconds, unit, most)

    def _error(self, name: str) -> float:
        """Distance to float64 on the small batch; of large models with few layers, one product at a time."""
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
    """All weights, shared ones once."""
    return sum(p.numel() for p in module.parameters())


def draw(module: nn.Module, seed: int) -> Tree:
    """A direction: Gaussian, in float32, drawn on the CPU, or where the weights are if they are many."""
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
    """Products after the first, by the end of which what is recorded is recorded; two where they are long."""
    start = time.monotonic()
    for number in range(calls):
        if number > 1 and time.monotonic() - start > PATIENCE:
            return
        timed(call, device)


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, until the device has done it."""
    _wait(device)
    start = time.perf_counter()
    found = call()
    _wait(device)
    seconds = time.perf_counter() - start
    del found
    return seconds


def clean() -> None:
    """Free what engines keep, what waits in circles, and what the allocator holds."""
    forget_everything()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Peaks count from now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> float:
    """Bytes that were allocated at most; nan where it is not known."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else nan


@contextmanager
def precision(*, tf32: bool) -> Iterator[None]:
    """Matrix products in TF32, or in full float32, inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
