"""Where optimizers are compared: a model at random weights, batches for its steps, data for its loss.

The optimizers that are compared, each with one setting that is tuned: its learning rate.

No one has weight decay or a schedule. What else they have is theirs by default, or said here.

The search for a learning rate, the same for every optimizer.

Some rates at a part of the budget; at all of it the better half of them, since what is best early need not be
in the end; then neighbors of the best one on a ladder, 1 and 3 times powers of ten, until it lies between
two that are no better, or too many were tried. A valley that neither half has seen can be missed.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
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
from curvescope.runs.shown import OPEN
from curvescope.studies.common.statistics import below

if TYPE_CHECKING:
    from curvescope.studies.optimizers.study import Compared

DIGITS, WIDTH = 2, 32
SEQ_LEN, TOKENS = 16, 24_576
HELD_OUT = 64  # sequences of text; of addition twice as many
BUDGETS = {"addition": 150.0, "tiny-gpt": 35.0}
"""The budget of a run, in gradients, by arena."""


class Arena(NamedTuple):
    """What one seed of one arena gives to every optimizer alike."""

    model: Model
    batches: Batches  # in the order of the steps
    held_out: Problem

    def batch(self, step: int) -> Batch:
        """The batch of a step; they are read round and round."""
        return self.batches[step % len(self.batches)]


def addition(seed: int, batch_size: int, device: str) -> Arena:
    """Sums of two numbers of two digits, by a Transformer of one layer (Ormaniec et al., 2025).

    Held-out sums are drawn anew: with 10,000 of them in all, some are among those of training.
    """
    shape = TransformerConfig(
        n_layers=1, d_model=WIDTH, n_heads=4, n_ctx=3 * DIGITS + 3, vocab_size=12, init="scaled", seed=seed
    )
    model = load(Transformer(shape), dtype="float32", device=device)
    many = {"num_sequences": 256 * batch_size, "digits": DIGITS, "batch_size": batch_size}
    others = task_data("addition", num_sequences=2 * HELD_OUT, digits=DIGITS, seed=seed + 1_000_003)
    return Arena(model, task_data("addition", **many, seed=seed), Problem(model, others))


def tiny_gpt(seed: int, batch_size: int, device: str) -> Arena:
    """The bundled model's shape with weights of its own, on the bundled text; some windows are held out."""
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
    """One batch of single sequences."""
    inputs, targets = (
        torch.cat(parts) for parts in zip(*((w.inputs, w.targets) for w in windows), strict=True)
    )
    return Batch(inputs, targets)


ARENAS: dict[str, Callable[[int, int, str], Arena]] = {"addition": addition, "tiny-gpt": tiny_gpt}


@lru_cache(maxsize=16)
def make_arena(name: str, seed: int, batch_size: int, device: str) -> Arena:
    """One of ARENAS, kept for all optimizers: runs train copies of its model."""
    return ARENAS[name](seed, batch_size, device)


# ------------------------------------------------------------------------------------------------- contenders

Make = Callable[[Iterable[Tensor], float], torch.optim.Optimizer]


class Contender(NamedTuple):
    """An optimizer as a function of parameters and learning rate, and words on it."""

    make: Make
    words: str


def _sgd(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def _adamw(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.0)


def _newton(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return optim.NewtonCG(params, lr, max_products=10)


def _sharpness(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return optim.SharpnessGD(params, lr, every=5, num_products=2, first_products=5)


def _block(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return optim.BlockSGD(
        params, lr, momentum=0.9, every=10, num_products=2, first_products=3, measure="together"
    )


def _hutchinson(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return optim.HutchinsonAdam(params, lr)


def _clipped(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return optim.ClippedNewton(params, lr, estimate="bartlett", scale=0.05)


def _kfac(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    return optim.KFACDescent(params, lr, momentum=0.9, every=20)


CONTENDERS: dict[str, Contender] = {
    "sgd": Contender(_sgd, "torch.optim.SGD, momentum 0.9"),
    "adamw": Contender(_adamw, "torch.optim.AdamW without weight decay"),
    "newton_cg": Contender(_newton, "trust region, at most 10 products of the Hessian a step"),
    "sharpness_gd": Contender(_sharpness, "η = lr/λ_max, λ_max by 2 products at every 5th step"),
    "block_sgd": Contender(
        _block, "η = lr/λ of each tensor, momentum 0.9, all λ by two products at every 10th step"
    ),
    "hutchinson_adam": Contender(_hutchinson, "after AdaHessian: one product a step"),
    "clipped_newton": Contender(_clipped, "after Sophia-G: drawn targets at every 10th step"),
    "kfac_descent": Contender(_kfac, "K-FAC, factors at every 20th step, momentum 0.9"),
}
FIRST_ORDER = ("sgd", "adamw")


# ----------------------------------------------------------------------------------------------------- course

PASSES = {"losses": 1.0, "gradients": 2.0, "products": 4.0, "block_products": 1.5}
"""What each counts in forward passes: a product as two backward passes, a block product as was measured."""
GRADIENT = 3.0  # forward passes of a loss and its gradient
AXES = ("steps", "work", "seconds")
DIVERGED = (CurvescopeError, torch.linalg.LinAlgError)  # pyright: ignore[reportPrivateImportUsage]
"""What weights, a loss or a product that are not finite raise."""


@dataclass(frozen=True)
class Course(Result):
    """A run, looked at K times, first before the first step; its loss is on held-out data."""

    optimizer: str
    rate: float
    seed: int
    steps: np.ndarray  # (K,)
    work: np.ndarray  # (K,) in gradients: (losses + 2 gradients + 4 products + 1.5 block products) / 3
    products: np.ndarray  # (K,) of the Hessian, whole ones
    seconds: np.ndarray  # (K,) of the processor
    wall: np.ndarray  # (K,) seconds by the clock
    loss: np.ndarray  # (K,) infinite from where it diverged
    diverged: bool

    @property
    def final(self) -> float:
        """The loss at the end of the budget."""
        return float(self.loss[-1])

    def at(self, axis: str, value: float) -> float:
        """The loss at a point of an axis, linear between looks."""
        return float(np.interp(value, getattr(self, axis), self.loss))

    def end(self, axis: str) -> float:
        """How far the run goes on an axis."""
        return float(getattr(self, axis)[-1])


def run_course(arena: Arena, optimizer: str, rate: float, seed: int, budget: float, looks: int) -> Course:
    """Train a copy of the arena's model until its work reaches the budget."""
    runner = _Runner(arena, optimizer, rate)
    rows = [runner.look()]
    marks = np.linspace(0, budget, looks)[1:]
    try:
        for mark in marks:
            if runner.work >= mark:  # one step went past several
                continue
            while runner.work < mark:
                runner.step()
            rows.append(runner.look())
    except UsageError:  # our own mistake
        raise
    except DIVERGED:
        runner.diverged = True
    if runner.diverged or not math.isfinite(rows[-1][-1]):
        rows = [*rows, runner.lost(budget)]
    columns = np.array(rows, dtype=float).T
    return Course(optimizer, rate, seed, *columns, diverged=bool(not np.isfinite(columns[-1]).all()))


class _Runner:
    """A model in training, its clocks, and what was spent."""

    def __init__(self, arena: Arena, optimizer: str, rate: float):
        self.arena = arena
        self.model = replace(arena.model, module=copy.deepcopy(arena.model.module))
        self.optimizer = CONTENDERS[optimizer].make(self.model.module.parameters(), rate)
        self.held_out = Problem(self.model, arena.held_out.batches)
        self.spent = dict.fromkeys(PASSES, 0.0)
        self.steps, self.processor, self.wall, self.diverged = 0, 0.0, 0.0, False

    @property
    def work(self) -> float:
        """In gradients."""
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
        """As in any training loop, on the same loss."""
        loss = parts_of(problem).loss
        if not bool(torch.isfinite(loss)):
            raise CurvescopeError(f"the loss is {float(loss.detach())}")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.spent["losses"] += 1
        self.spent["gradients"] += 1

    def look(self) -> tuple[float, ...]:
        """Steps, work, products, seconds, the clock's, and the loss on held-out data; not counted."""
        loss = self.held_out.loss_value()
        products = self.spent["products"]
        return (self.steps, self.work, products, self.processor, self.wall, loss)

    def lost(self, budget: float) -> tuple[float, ...]:
        """The end of a run that diverged."""
        work = max(self.work, budget)
        return (self.steps, work, self.spent["products"], self.processor, self.wall, math.inf)


def work_of(spent: Mapping[str, float]) -> float:
    """Losses, gradients and products in units of a gradient with its loss."""
    return sum(PASSES[name] * count for name, count in spent.items()) / GRADIENT


# ----------------------------------------------------------------------------------------------------- tuning

SHARE = 0.25  # of the budget, for the first rates


@dataclass(frozen=True)
class Search(Result):
    """Rates that were tried at the whole budget, in this order, on the seed of the tuning."""

    rates: np.ndarray  # (K,)
    losses: np.ndarray  # (K,) at the end; infinite where it diverged

    @property
    def best(self) -> float:
        """The rate of the lowest loss; the smallest one where all have diverged."""
        return lowest(self.rates, self.losses)

    @property
    def missing(self) -> list[float]:
        """The neighbors of the best that were not tried."""
        return [rate for rate in neighbors(self.best) if not np.isclose(self.rates, rate).any()]

    @property
    def inside(self) -> bool:
        """Whether the best was better than a smaller and a larger one, which did not diverge all alike."""
        return not self.missing and bool(np.isfinite(self.losses).any())


def lowest(rates: Sequence[float] | np.ndarray, losses: Sequence[float] | np.ndarray) -> float:
    """The rate of the lowest loss, the smaller one of two."""
    known = [math.inf if math.isnan(loss) else float(loss) for loss in losses]
    return float(min(zip(known, rates, strict=True))[1])


def rung(rate: float) -> float:
    """The nearest rate of the ladder."""
    return _rate(round(2 * math.log10(rate)))


def neighbors(rate: float) -> tuple[float, float]:
    """The next larger and the next smaller rate of the ladder."""
    number = round(2 * math.log10(rate))
    return _rate(number + 1), _rate(number - 1)


def _rate(number: int) -> float:
    return float(f"{(1, 3)[number % 2]}e{number // 2}")


def begin(rates: Sequence[float], losses: Sequence[float], trial: Callable[[float], float]) -> Search:
    """The first trials at the whole budget: the better half of the first rates that did not diverge."""
    known = [math.inf if math.isnan(loss) else float(loss) for loss in losses]
    order = sorted(zip(known, rates, strict=True))[: -(-len(rates) // 2)]
    chosen = dict.fromkeys(rung(rate) for i, (loss, rate) in enumerate(order) if i == 0 or loss < math.inf)
    return Search(np.array(list(chosen)), np.array([trial(rate) for rate in chosen]))


def go_on(search: Search, trial: Callable[[float], float]) -> Search:
    """One more rate, a neighbor of the best; nothing where both were tried."""
    if not search.missing:
        return search
    rate = search.missing[0]
    return Search(np.append(search.rates, rate), np.append(search.losses, trial(rate)))


# ------------------------------------------------------------------------------------------------- comparison


class Gap(NamedTuple):
    """loss(one) − loss(other) as far as both go: a mean over seeds with its 95 % interval."""

    at: float  # on the axis
    mean: float
    low: float
    high: float
    seeds: int

    @property
    def verdict(self) -> str:
        """Whether the one's loss is lower."""
        return below(self)

    @property
    def words(self) -> str:
        """The mean and its interval."""
        if not math.isfinite(self.mean):
            return "diverged"
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def gap(one: Sequence[Course], other: Sequence[Course], axis: str) -> Gap:
    """At the farthest point of an axis that all runs of both reach."""
    at = min(course.end(axis) for course in (*one, *other))
    losses = np.array([[c.at(axis, at) for c in courses] for courses in (one, other)])
    both = np.isinf(losses).all(axis=0)  # of which neither is lower
    values = np.where(both, math.nan, losses[0] - np.where(both, 0.0, losses[1]))
    return Gap(at, *interval(values), len(values))


def judged(result: Compared, arena: str, one: str, other: str, axis: str) -> tuple[Gap, str]:
    """The difference of two, and the verdict: open where a better rate may lie beyond those tried."""
    found = gap(result.of(arena, one), result.of(arena, other), axis)
    edge = any(result.at_edge(arena, name) for name in (one, other))
    return found, OPEN if edge else found.verdict


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean and Student's interval; no number is finite where a run diverged.

    The ends are known where all values are infinite on one side: every run has diverged, and that decides.
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


def band(courses: Sequence[Course], axis: str, num: int = 40) -> tuple[np.ndarray, ...]:
    """An axis as far as all runs go, and mean m, low and high of the loss along it: (num,) each.

    With Student's half width h the ends are m exp(∓ h / m), the interval of log m: a loss is positive.
    """
    x = np.linspace(0, min(course.end(axis) for course in courses), num)
    losses = [[course.at(axis, float(value)) for course in courses] for value in x]
    mean, _, high = np.array([interval(np.array(row)) for row in losses]).T
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        half = (high - mean) / mean
        return x, mean, mean * np.exp(-half), mean * np.exp(half)
