"""Training runs of the study `optimizers`: tasks, optimizers, learning-rate search and comparison.

An arena is a model at random weights, with batches for its steps and held-out data for its loss. Every
optimizer has one tuned setting, its learning rate. None uses weight decay or a schedule; other settings are
the optimizer's defaults or are set in this module.

The learning-rate search is the same for every optimizer. It tries some rates with a part of the budget, and
the better half of them with the full budget, because the best rate early in a run need not be the best at its
end. It then tries neighbors of the best rate on a ladder (1 and 3 times powers of ten), until both neighbors
of the best rate are worse or the trials are used up. The search can miss a second minimum.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope import optim
from curvescope.algorithms.estimates.intervals import mean_interval
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.result import Result
from curvescope.core.seeds import generator
from curvescope.data.batches import Batch, Batches
from curvescope.data.tasks import task_data
from curvescope.data.text import text_data
from curvescope.models.forward_errors import not_finite
from curvescope.models.load import load
from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.optim import CurvatureOptimizer
from curvescope.optim.objective import parts_of
from curvescope.problem import Problem
from curvescope.runs.study_result import OPEN
from curvescope.studies.common.statistics import below
from curvescope.studies.common.training import rate_of, rung_of

if TYPE_CHECKING:
    from curvescope.studies.optimizers.study import OptimizerComparison

DIGITS, WIDTH = 2, 32
SEQ_LEN, TOKENS = 16, 24_576
HELD_OUT = 64  # sequences of text; twice as many for addition
BUDGETS = {"addition": 150.0, "tiny-gpt": 35.0}
"""Budget of a run in gradients, by arena."""


class Arena(NamedTuple):
    """Model, training batches and held-out data of one arena and seed, the same for every optimizer."""

    model: Model
    batches: Batches  # in the order of the training steps
    held_out: Problem

    def batch(self, step: int) -> Batch:
        """Return the batch of a training step; batches repeat in the same order."""
        return self.batches[step % len(self.batches)]


def addition(seed: int, batch_size: int, device: str) -> Arena:
    """Sums of two two-digit numbers, computed by a one-layer Transformer (Ormaniec et al., 2025).

    Held-out sums are drawn independently. Only 10,000 sums exist, so some of them also occur in training.
    """
    shape = TransformerConfig(
        n_layers=1, d_model=WIDTH, n_heads=4, n_ctx=3 * DIGITS + 3, vocab_size=12, init="scaled", seed=seed
    )
    model = load(Transformer(shape), dtype="float32", device=device)
    many = {"num_sequences": 256 * batch_size, "digits": DIGITS, "batch_size": batch_size}
    others = task_data("addition", num_sequences=2 * HELD_OUT, digits=DIGITS, seed=seed + 1_000_003)
    return Arena(model, task_data("addition", **many, seed=seed), Problem(model, others))


def tiny_gpt(seed: int, batch_size: int, device: str) -> Arena:
    """The bundled model's architecture with new random weights and held-out windows of its text."""
    bundled = load("tiny-gpt", dtype="float32", device=device)
    module = bundled.module
    assert isinstance(module, Transformer)
    model = load(Transformer(replace(module.cfg, seed=seed)), dtype="float32", device=device)
    windows = list(text_data("sample", bundled, tokens=TOKENS, seq_len=SEQ_LEN, batch_size=1))
    others, rest = windows[:HELD_OUT], windows[HELD_OUT:]
    order = _order(len(rest), seed)
    cut = [order[i : i + batch_size] for i in range(0, len(order) - batch_size + 1, batch_size)]
    batches = Batches([_joined([rest[i] for i in part]) for part in cut], name="text:sample")
    return Arena(model, batches, Problem(model, Batches([_joined(others)], name="held out")))


def _order(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=generator(seed, 1)).tolist()


def _joined(windows: list[Batch]) -> Batch:
    """Join single sequences into one batch."""
    inputs, targets = (
        torch.cat(parts) for parts in zip(*((w.inputs, w.targets) for w in windows), strict=True)
    )
    return Batch(inputs, targets)


ARENAS: dict[str, Callable[[int, int, str], Arena]] = {"addition": addition, "tiny-gpt": tiny_gpt}


@lru_cache(maxsize=16)
def make_arena(name: str, seed: int, batch_size: int, device: str) -> Arena:
    """Return an arena. It is cached for all optimizers; runs train copies of its model."""
    return ARENAS[name](seed, batch_size, device)


# ------------------------------------------------------------------------------------------------- contenders

Make = Callable[[Iterable[Tensor], float], torch.optim.Optimizer]


class Contender(NamedTuple):
    """An optimizer as a function of parameters and learning rate, with a description."""

    make: Make
    words: str


_block = partial(optim.BlockSGD, momentum=0.9, every=10, num_products=2, first_products=3, measure="together")
_sharpness = partial(optim.SharpnessGD, every=5, num_products=2, first_products=5)
CONTENDERS: dict[str, Contender] = {
    "sgd": Contender(
        lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9), "torch.optim.SGD, momentum 0.9"
    ),
    "adamw": Contender(
        lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.0),
        "torch.optim.AdamW without weight decay",
    ),
    "newton_cg": Contender(
        partial(optim.NewtonCG, max_products=10), "trust region, at most 10 Hessian-vector products per step"
    ),
    "sharpness_gd": Contender(_sharpness, "η = lr/λ_max; λ_max from 2 Hessian-vector products every 5 steps"),
    "block_sgd": Contender(
        _block, "η = lr/λ for each tensor, momentum 0.9; every λ from two products every 10 steps"
    ),
    "hutchinson_adam": Contender(
        optim.HutchinsonAdam, "like AdaHessian: one Hessian-vector product per step"
    ),
    "clipped_newton": Contender(
        partial(optim.ClippedNewton, estimate="bartlett", scale=0.05),
        "like Sophia-G: sampled targets every 10 steps",
    ),
    "kfac_descent": Contender(
        partial(optim.KFACDescent, momentum=0.9, every=20), "K-FAC, factors every 20 steps, momentum 0.9"
    ),
}
FIRST_ORDER = ("sgd", "adamw")


# ----------------------------------------------------------------------------------------------------- course

PASSES = {"losses": 1.0, "gradients": 2.0, "products": 4.0, "block_products": 1.5}
"""Cost of each operation in forward passes. A product counts as two backward passes; the cost of a block
product was measured.
"""
GRADIENT = 3.0  # forward passes of a loss and its gradient
AXES = ("steps", "work", "seconds")
DIVERGED = (CurvescopeError, torch.linalg.LinAlgError)  # pyright: ignore[reportPrivateImportUsage]
"""Exceptions raised if weights, a loss or a product are not finite."""


@dataclass(frozen=True)
class TrainingRun(Result):
    """A training run with K measurements of the held-out loss, the first one before the first step."""

    optimizer: str
    rate: float
    seed: int
    steps: np.ndarray  # (K,)
    work: np.ndarray  # (K,) in gradients: (losses + 2 gradients + 4 products + 1.5 block products) / 3
    products: np.ndarray  # (K,) full Hessian-vector products
    seconds: np.ndarray  # (K,) processor seconds
    wall: np.ndarray  # (K,) wall-clock seconds
    loss: np.ndarray  # (K,) held-out loss, infinite after the run diverged
    diverged: bool

    @property
    def final(self) -> float:
        """Held-out loss at the end of the budget."""
        return float(self.loss[-1])

    def at(self, axis: str, value: float) -> float:
        """Loss at a point of an axis, interpolated linearly between measurements."""
        return float(np.interp(value, getattr(self, axis), self.loss))

    def end(self, axis: str) -> float:
        """End of the run on an axis."""
        return float(getattr(self, axis)[-1])


def run_course(
    arena: Arena, optimizer: str, rate: float, seed: int, budget: float, looks: int
) -> TrainingRun:
    """Train a copy of the arena's model until its work reaches the budget."""
    runner = _Runner(arena, optimizer, rate)
    rows = [runner.look()]
    marks = np.linspace(0, budget, looks)[1:]
    try:
        for mark in marks:
            if runner.work >= mark:  # one step can pass several marks
                continue
            while runner.work < mark:
                runner.step()
            rows.append(runner.look())
    except UsageError:  # a wrong setting, not a diverged run
        raise
    except DIVERGED:
        runner.diverged = True
    if runner.diverged or not math.isfinite(rows[-1][-1]):
        rows = [*rows, runner.lost(budget)]
    columns = np.array(rows, dtype=float).T
    return TrainingRun(optimizer, rate, seed, *columns, diverged=bool(not np.isfinite(columns[-1]).all()))


class _Runner:
    """Train a model, and count its time and work."""

    def __init__(self, arena: Arena, optimizer: str, rate: float):
        self.arena = arena
        self.model = replace(arena.model, module=copy.deepcopy(arena.model.module))
        self.optimizer = CONTENDERS[optimizer].make(self.model.module.parameters(), rate)
        self.held_out = Problem(self.model, arena.held_out.batches)
        self.spent = dict.fromkeys(PASSES, 0.0)
        self.steps, self.processor, self.wall, self.diverged = 0, 0.0, 0.0, False

    @property
    def work(self) -> float:
        """Work so far, in gradients."""
        return work_of(self.spent)

    def step(self) -> None:
        if not_finite(self.model, dict(self.model.named_parameters())):
            raise CurvescopeError("the weights are not finite")
        batch = Batches([self.arena.batch(self.steps)])
        clocks = time.process_time(), time.perf_counter()
        if isinstance(self.optimizer, CurvatureOptimizer):
            self.optimizer.step(lambda: Problem(self.model, batch))
            self.spent = {name: float(self.optimizer.work[name]) for name in PASSES}
        else:
            self._plain_step(Problem(self.model, batch))
        self.processor += time.process_time() - clocks[0]
        self.wall += time.perf_counter() - clocks[1]
        self.steps += 1

    def _plain_step(self, problem: Problem) -> None:
        """Take a step of a PyTorch optimizer on the same loss."""
        loss = parts_of(problem).loss
        if not bool(torch.isfinite(loss)):
            raise CurvescopeError(f"the loss is {float(loss.detach())}")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.spent["losses"] += 1
        self.spent["gradients"] += 1

    def look(self) -> tuple[float, ...]:
        """Return steps, work, products, processor and wall seconds, and the held-out loss (no work)."""
        loss = self.held_out.loss_value()
        products = self.spent["products"]
        return (self.steps, self.work, products, self.processor, self.wall, loss)

    def lost(self, budget: float) -> tuple[float, ...]:
        """Return the final measurement of a diverged run."""
        work = max(self.work, budget)
        return (self.steps, work, self.spent["products"], self.processor, self.wall, math.inf)


def work_of(spent: Mapping[str, float]) -> float:
    """Convert counts of losses, gradients and products to units of one loss with its gradient."""
    return sum(PASSES[name] * count for name, count in spent.items()) / GRADIENT


# ----------------------------------------------------------------------------------------------------- tuning

SHARE = 0.25  # of the budget, used for the first rates


@dataclass(frozen=True)
class RateSearch(Result):
    """Learning rates tried with the full budget, in order, on the tuning seed."""

    rates: np.ndarray  # (K,)
    losses: np.ndarray  # (K,) at the end of the run; infinite if the run diverged

    @property
    def best(self) -> float:
        """Rate with the lowest loss; the smallest rate if all runs diverged."""
        return lowest(self.rates, self.losses)

    @property
    def missing(self) -> list[float]:
        """Neighbors of the best rate that were not tried."""
        return [rate for rate in neighbors(self.best) if not np.isclose(self.rates, rate).any()]

    @property
    def inside(self) -> bool:
        """Return True if both neighbors of the best rate were tried and at least one run did not diverge."""
        return not self.missing and bool(np.isfinite(self.losses).any())


def lowest(rates: Sequence[float] | np.ndarray, losses: Sequence[float] | np.ndarray) -> float:
    """Return the rate with the lowest loss; of equal losses, the smaller rate."""
    known = [math.inf if math.isnan(loss) else float(loss) for loss in losses]
    return float(min(zip(known, rates, strict=True))[1])


def neighbors(rate: float) -> tuple[float, float]:
    """Return the next larger and the next smaller rate of the ladder."""
    rung = rung_of(rate)
    return rate_of(rung + 1), rate_of(rung - 1)


def begin(rates: Sequence[float], losses: Sequence[float], trial: Callable[[float], float]) -> RateSearch:
    """Try the better half of the first rates with the full budget, without those that diverged."""
    known = [math.inf if math.isnan(loss) else float(loss) for loss in losses]
    order = sorted(zip(known, rates, strict=True))[: -(-len(rates) // 2)]
    chosen = dict.fromkeys(
        rate_of(rung_of(rate)) for i, (loss, rate) in enumerate(order) if i == 0 or loss < math.inf
    )
    return RateSearch(np.array(list(chosen)), np.array([trial(rate) for rate in chosen]))


def go_on(search: RateSearch, trial: Callable[[float], float]) -> RateSearch:
    """Try one more rate, a neighbor of the best; return the search unchanged if both were tried."""
    if not search.missing:
        return search
    rate = search.missing[0]
    return RateSearch(np.append(search.rates, rate), np.append(search.losses, trial(rate)))


# ------------------------------------------------------------------------------------------------- comparison


class LossDifference(NamedTuple):
    """Mean over seeds of loss(first) − loss(second) at the last point both reach, with a 95 % interval."""

    at: float  # point on the axis
    mean: float
    low: float
    high: float
    seeds: int

    @property
    def verdict(self) -> str:
        """Return the verdict of the interval on “the first has the lower loss”."""
        return below(self)

    @property
    def words(self) -> str:
        """Format the mean and its interval."""
        if not math.isfinite(self.mean):
            return "diverged"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def gap(first: Sequence[TrainingRun], second: Sequence[TrainingRun], axis: str) -> LossDifference:
    """Compare two optimizers at the farthest point of an axis that all their runs reach."""
    at = min(course.end(axis) for course in (*first, *second))
    losses = np.array([[c.at(axis, at) for c in courses] for courses in (first, second)])
    both = np.isinf(losses).all(axis=0)  # both diverged, so neither loss is lower
    values = np.where(both, math.nan, losses[0] - np.where(both, 0.0, losses[1]))
    return LossDifference(at, *interval(values), len(values))


def judged(
    result: OptimizerComparison, arena: str, first: str, second: str, axis: str
) -> tuple[LossDifference, str]:
    """Compare two optimizers. The verdict stays open if a better rate may lie beyond the rates tried."""
    difference = gap(result.of(arena, first), result.of(arena, second), axis)
    edge = any(result.at_edge(arena, name) for name in (first, second))
    return difference, OPEN if edge else difference.verdict


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean with Student's 95 % interval; if a run diverged, no number is finite.

    If all values are infinite with the same sign, the ends of the interval equal that value: every run
    diverged, which decides the comparison.
    """
    n = len(values)
    if not np.isfinite(values).all():
        first = float(values[0])
        alike = math.isinf(first) and bool((values == first).all())
        return (first, first, first) if alike else (math.inf, math.nan, math.nan)
    mean = values.mean()
    stderr = values.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
    low, high = mean_interval(np.array(mean), np.array(stderr), n - 1)
    return float(mean), float(low), float(high)


def band(courses: Sequence[TrainingRun], axis: str, num: int = 40) -> tuple[np.ndarray, ...]:
    """Points along an axis up to the end of the shortest run, with the mean loss m and its interval: (num,)
    each.

    The ends are m exp(∓ h / m), where h is Student's half width: an interval of log m, because a loss is
    positive.
    """
    x = np.linspace(0, min(course.end(axis) for course in courses), num)
    losses = [[course.at(axis, float(value)) for course in courses] for value in x]
    mean, _, high = np.array([interval(np.array(row)) for row in losses]).T
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        half = (high - mean) / mean
        return x, mean, mean * np.exp(-half), mean * np.exp(half)
