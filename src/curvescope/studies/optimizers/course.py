"""One run of one optimizer: its loss against steps, work and time."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.core.result import Result
from curvescope.data.batches import Batches
from curvescope.models.finite import not_finite
from curvescope.optim import CurvatureOptimizer
from curvescope.optim.objective import parts_of
from curvescope.problem import Problem
from curvescope.studies.optimizers.arenas import Arena
from curvescope.studies.optimizers.contenders import CONTENDERS

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
