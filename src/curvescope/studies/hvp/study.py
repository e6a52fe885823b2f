"""What a product costs: time in gradients, memory, the first call, and how far it is from float64.

Same model, same tokens, same run for all: our engines and, where they are installed, other libraries.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from curvescope.algorithms import spectral_density
from curvescope.core.config import Config as BaseConfig
from curvescope.core.config import setting
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.numbers import data_size
from curvescope.core.progress import Progress
from curvescope.core.seeds import generator
from curvescope.core.tensors.memory import free_bytes
from curvescope.data.batches import Batch, Batches
from curvescope.models.load import as_device, load
from curvescope.operators import Hessian
from curvescope.problem import Problem
from curvescope.runs.work import Piece, Place, State, work_through
from curvescope.studies.hvp import committed
from curvescope.studies.hvp.contenders import CHECKPOINTED, CONTENDERS
from curvescope.studies.hvp.costs import Cost, Measured
from curvescope.studies.hvp.measure import LAYERS, Bench, clean, num_parameters, precision, timed
from curvescope.studies.hvp.models import SHAPES, build

LOG = logging.getLogger("curvescope")
DEFAULT = ("gradient", "hessian", "ggn", "functional", "hessian autograd", "eigenthings", "curvlinops")


@dataclass(frozen=True)
class Config(BaseConfig):
    """Which model, how many tokens, whom to measure. The defaults take about a minute on a CPU."""

    model: Literal["gpt2", "llama", "neox", "encoder"] = setting(
        "gpt2", "whose architecture, with random weights; encoder: torch's nn.TransformerEncoder"
    )
    size: Literal["small", "124M", "350M", "1.5B", "8B"] = setting(
        "small", "a million parameters, those of GPT-2 and two larger ones, or those of Llama 3 8B"
    )
    batch_size: int = setting(8, "sequences")
    seq_len: int = setting(128, "tokens of each")
    device: str = setting("cpu", "cpu, cuda, …")
    tf32: bool = setting(False, "matrix products in TF32")
    contenders: tuple[str, ...] = setting(
        DEFAULT, f"whom to measure, of {', '.join(CONTENDERS)}; of 8B ours with checkpoint"
    )
    rounds: int = setting(7, "how often each is measured, next to a gradient")
    slq: bool = setting(False, "the whole job too: a density with 10 probes × 100 steps")
    seed: int = setting(0, "of weights, tokens and directions")
    columns: tuple[int, ...] = setting((1,), "columns at once that our products are measured with too")

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
            raise UsageError(
                f"the size 8B is that of a Llama, got the model {self.model!r}", hint="model=llama"
            )
        wrong = [name for name in self.chosen if self.size == "8B" and name not in CHECKPOINTED]
        if wrong:
            raise UsageError(
                f"of the size 8B only {' and '.join(map(repr, CHECKPOINTED))} are measured, got {wrong[0]!r}"
            )

    @property
    def chosen(self) -> tuple[str, ...]:
        """Whom to measure beside the gradient; by default those that fit."""
        given = CHECKPOINTED if self.size == "8B" and self.contenders == DEFAULT else self.contenders
        return tuple(name for name in given if name != "gradient")


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Cost:
    """Measure the contenders, one at a time, each against a gradient of the same rounds.

    Of models with more than 200 M parameters the gradient is measured before the others, and errors on a
    model of the same shape with two layers. A place is told of each contender as soon as it is measured.
    """
    device = as_device(cfg.device)
    _check_room(cfg, device)
    make = partial(build, cfg.model, cfg.size, max(cfg.seq_len, 1024), seed=cfg.seed, device=device)
    module, shape = make(), (cfg.batch_size, cfg.seq_len)
    x, y = (_tokens(SHAPES[cfg.size][3], shape, cfg.seed, i).to(device) for i in (0, 1))
    shallow = partial(make, layers=LAYERS)
    bench = Bench(module, x, y, shallow, cfg.size == "8B", cfg.rounds, cfg.columns, cfg.seed)
    names = ("gradient", *cfg.chosen)
    with precision(tf32=cfg.tf32):
        pieces = [Piece(name, partial(_measured, bench, name, state)) for name in names]
        found = work_through(pieces, progress=progress)  # times of one process only: no state
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
    """Raise where weights, a direction, a product and a gradient of such a model have no room."""
    n = sum(p.numel() for p in build(cfg.model, cfg.size, max(cfg.seq_len, 1024), device="meta").parameters())
    needed, free = n * (14 if cfg.size == "8B" else 16), free_bytes(device)
    if needed > free:
        raise UsageError(
            f"the size {cfg.size} needs at least {data_size(needed)} of memory on {device.type}, "
            f"{data_size(free)} are free",
            hint="a smaller size, or another device",
        )


def _tokens(vocabulary: int, shape: tuple[int, int], seed: int, stream: int) -> Tensor:
    return torch.randint(vocabulary, shape, generator=generator(seed, stream))


def _measured(bench: Bench, name: str, state: State | None) -> Measured:
    found = bench.measured(name)
    if isinstance(state, Place):
        state.tell("  ".join(part for part in found.line() if part))
    return found


def _beside_committed(cost: Cost, state: State | None) -> Cost:
    """The result with what is committed for this device; a person is told of what got worse."""
    cost = replace(cost, committed=committed.known(cost))
    worse = committed.compared(cost)
    for line in worse if cost.device != "cpu" else []:  # on a CPU it is a note alone
        if isinstance(state, Place):
            state.warn(line)
        else:
            LOG.warning("%s", line)
    return replace(cost, notes=worse)


def _slq(module: nn.Module, x: Tensor, y: Tensor, seed: int) -> float:
    """Seconds of a density of the Hessian with 10 probes × 100 steps, everything included."""
    H = Hessian(Problem(load(module), Batches([Batch(x, y)])), engine="fast")
    bases = 1.1 * 101 * H.shape[0] * 4 / 2**30  # of one probe, which are orthogonalized against
    return timed(
        lambda: spectral_density(H, num_probes=10, num_steps=100, seed=seed, max_gib=max(8, bases)), x.device
    )
