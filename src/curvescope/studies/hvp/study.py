"""What a product costs: time in gradients, memory, the first call, and how far it is from float64.

Same model, same tokens, same run for all: our engines and, where they are installed, other libraries.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvescope.algorithms import spectral_density
from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.parts import MATRICES
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.data.batches import Batch, Batches
from curvescope.engines.keep import forget_everything
from curvescope.models.load import load
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.hvp.contenders import CONTENDERS, PACKAGES, Tree, gradient
from curvescope.studies.hvp.models import SHAPES, build, logits, plain_attention

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

nan = math.nan
DEFAULT = ("gradient", "hessian", "ggn", "functional", "hessian autograd", "eigenthings", "curvlinops")
FEW = (2, 128)  # sequences and positions of the comparison with float64


@dataclass(frozen=True)
class Config(BaseConfig):
    """Which model, how many tokens, whom to measure. The defaults take about a minute on a CPU."""

    model: Literal["gpt2", "llama", "neox"] = setting("gpt2", "whose architecture, with random weights")
    size: Literal["small", "124M"] = setting("small", "a million parameters, or those of GPT-2")
    batch_size: int = setting(8, "sequences")
    seq_len: int = setting(128, "tokens of each")
    device: str = setting("cpu", "cpu, cuda, …")
    tf32: bool = setting(False, "matrix products in TF32")
    contenders: tuple[str, ...] = setting(DEFAULT, "whom to measure")
    rounds: int = setting(7, "how often each is measured, next to a gradient")
    slq: bool = setting(False, "the whole job too: a density with 10 probes × 100 steps")
    seed: int = setting(0, "of weights, tokens and directions")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.contenders:
            if name not in CONTENDERS:
                raise UsageError(f"unknown contender {name!r}", hint=near_misses(name, list(CONTENDERS)))


@dataclass(frozen=True)
class Measured(Result):
    """One contender."""

    name: str
    seconds: list[float]  # one per round
    unit: list[float]  # of a gradient, next to each
    first: float  # seconds of the first call: what is built or compiled, and one product
    peak: float  # bytes at most during a product, all included; nan where it is not known (CPU)
    error: float  # ‖found − exact‖ / ‖exact‖ on a small batch, exact in float64; nan for the gradient
    note: str = ""  # why there are no numbers


@dataclass(frozen=True)
class Cost(Shown):
    """All contenders, on one model and batch."""

    model: str
    device: str
    num_parameters: int
    tokens: str
    tf32: bool
    measured: list[Measured] = field(default_factory=list)
    slq_seconds: float = nan

    def of(self, name: str) -> Measured:
        """The contender of that name."""
        return next(m for m in self.measured if m.name == name)

    def ratio(self, name: str) -> tuple[float, float, float]:
        """Time in gradients, round by round: median, least, most."""
        m = self.of(name)
        found = [a / b for a, b in zip(m.seconds, m.unit, strict=True)]
        return (statistics.median(found), min(found), max(found)) if found else (nan, nan, nan)

    def summary(self) -> list[Line]:
        """Each contender: time in gradients, and the rest in words."""
        lines = [("model", self.model, f"{self.num_parameters:,} parameters, {self.tokens} on {self.device}")]
        for m in self.measured:
            if m.note:
                lines.append((m.name, "–", m.note))
                continue
            median, low, high = self.ratio(m.name)
            words = [f"{low:.2f} to {high:.2f} gradients", f"first call {m.first:.1f} s"]
            words += [f"peak {m.peak / 2**30:.1f} GiB"] if m.peak == m.peak else []
            words += [f"error {m.error:.1e}"] if m.error == m.error else []
            lines.append((m.name, f"{median:.2f}×", ", ".join(words)))
        if self.slq_seconds == self.slq_seconds:
            lines.append(("SLQ 10 × 100", f"{self.slq_seconds:.0f} s", "density of the Hessian"))
        return lines

    def captions(self) -> dict[str, str]:
        """What the figure and the table show."""
        where = f"{self.model}, {self.tokens}, {self.device}{', TF32' if self.tf32 else ''}"
        return {
            "cost": f"Time of one product in units of one gradient of the same run ({where}); "
            "the bar is the median over rounds, the line their range.",
            "costs": "Error: distance to the product in float64, on a small batch.",
        }

    def tables(self) -> dict[str, pd.DataFrame]:
        """One row per contender."""
        import pandas as pd

        rows = []
        for m in self.measured:
            median, low, high = self.ratio(m.name)
            rows.append(
                {
                    "contender": m.name,
                    "gradients": median,
                    "low": low,
                    "high": high,
                    "seconds": statistics.median(m.seconds) if m.seconds else nan,
                    "first_s": m.first,
                    "peak_GiB": m.peak / 2**30,
                    "error": m.error,
                    "note": m.note,
                }
            )
        return {"costs": pd.DataFrame(rows)}

    def figures(self) -> dict[str, Figure]:
        """Bars of time, and of memory where it is known."""
        from curvescope.viz.cost import bars

        shown = [m for m in self.measured if m.seconds]
        memory = [m.peak / 2**30 for m in shown]
        return {
            "cost": bars(
                [m.name for m in shown],
                [self.ratio(m.name) for m in shown],
                memory if all(x == x for x in memory) else None,
            )
        }


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Cost:
    """Measure the contenders, one at a time, each against a gradient of the same rounds."""
    device = torch.device(cfg.device)
    with torch.random.fork_rng():
        torch.manual_seed(cfg.seed)
        module = build(cfg.model, cfg.size, max(cfg.seq_len, 1024)).to(device).eval()
    vocabulary = SHAPES[cfg.size][3]
    shape = (cfg.batch_size, cfg.seq_len)
    x, y = (torch.randint(vocabulary, shape, generator=generator(cfg.seed, i)).to(device) for i in (0, 1))
    source = generator(cfg.seed, 2)
    v = [torch.randn(p.shape, generator=source).to(p) for p in module.parameters()]
    exact = _exact(module, x, y, v)
    with _precision(tf32=cfg.tf32):
        names = ("gradient", *(c for c in cfg.contenders if c != "gradient"))
        pieces = [Piece(name, partial(_measure, name, module, x, y, v, exact, cfg.rounds)) for name in names]
        found = work_through(pieces, progress=progress)  # times of one process only: no state
        slq = _slq(module, x, y, cfg.seed) if cfg.slq else nan
    return Cost(
        f"{cfg.model} {cfg.size}",
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        sum(p.numel() for p in module.parameters()),
        f"{cfg.batch_size} × {cfg.seq_len} tokens",
        cfg.tf32,
        [found.take(Measured, name) for name in names],
        slq,
    )


def _measure(
    name: str, module: nn.Module, x: Tensor, y: Tensor, v: Tree, exact: dict[str, Tree], rounds: int
) -> Measured:
    def failed(why: str) -> Measured:
        return Measured(name, [], [], nan, nan, nan, why)

    if name in PACKAGES and find_spec(PACKAGES[name]) is None:
        return failed(f"{PACKAGES[name]} is not installed")
    forget_everything()
    gc.collect()
    try:
        unit, product = gradient(module, x, y), CONTENDERS[name](module, x, y)
        given = product.enter(v)
        _reset_peak(x.device)
        first = _time(lambda: product.times(given), x.device)
        for _ in range(2):  # what is recorded is recorded now
            _time(lambda: product.times(given), x.device)
        peak = _peak(x.device)
        pairs = [
            (_time(lambda: product.times(given), x.device), _time(lambda: unit.times(v), x.device))
            for _ in range(rounds)
        ]
        error = _error(name, module, x, y, v, exact)
    except torch.OutOfMemoryError:
        return failed("out of memory")
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return failed(f"failed: {str(error).splitlines()[0][:120]}")
    return Measured(name, [a for a, _ in pairs], [b for _, b in pairs], first, peak, error)


def _error(name: str, module: nn.Module, x: Tensor, y: Tensor, v: Tree, exact: dict[str, Tree]) -> float:
    """Distance to float64 on the small batch."""
    if name == "gradient":
        return nan
    want = exact[next((matrix for matrix in MATRICES if matrix in name), "hessian")]
    product = CONTENDERS[name](module, *_few(x, y))
    found = product.leave(product.times(product.enter(v)))
    gap = sum(float((a.double().cpu() - b).square().sum()) for a, b in zip(found, want, strict=True))
    return math.sqrt(gap / sum(float(b.square().sum()) for b in want))


def _exact(module: nn.Module, x: Tensor, y: Tensor, v: Tree) -> dict[str, Tree]:
    """H v, GGN v and their difference in float64: double backward, and Jᵀ (∂²ℓ/∂z²) J v."""
    module, (x, y) = copy.deepcopy(module).double(), _few(x, y)
    params, v = list(module.parameters()), [t.double() for t in v]
    with plain_attention(module):
        z = logits(module, x)
        loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
        first = torch.autograd.grad(loss, params, create_graph=True)
        Hv = torch.autograd.grad(first, params, v, retain_graph=True)
        u = torch.zeros_like(z, requires_grad=True)
        pulled = torch.autograd.grad(z, params, u, create_graph=True)
        (Jv,) = torch.autograd.grad(pulled, u, v)
        leaf = z.detach().requires_grad_()
        loss = F.cross_entropy(leaf.flatten(0, 1), y.flatten())
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
        (BJv,) = torch.autograd.grad(slope, leaf, Jv)
        GGNv = torch.autograd.grad(z, params, BJv)
    H, G = ([t.cpu() for t in tree] for tree in (Hv, GGNv))
    return {"hessian": H, "ggn": G, "functional": [a - b for a, b in zip(H, G, strict=True)]}


def _few(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    sequences, positions = FEW
    return x[:sequences, :positions], y[:sequences, :positions]


def _slq(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> float:
    """Seconds of a density of the Hessian with 10 probes × 100 steps, everything included."""
    H = Hessian(Problem(load(module), Batches([Batch(x, y)])), engine="fast")
    bases = 1.1 * 101 * H.shape[0] * 4 / 2**30  # of one probe, which are orthogonalised against
    return _time(
        lambda: spectral_density(H, num_probes=10, num_steps=100, seed=seed, max_gib=max(8, bases)), x.device
    )


def _time(call: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    found = call()
    _wait(device)
    seconds = time.perf_counter() - start
    del found
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> float:
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else nan


@contextmanager
def _precision(*, tf32: bool) -> Iterator[None]:
    """Matrix products in TF32, or in full float32, inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
