"""One training run, deterministic, on all the data at once, with a monitor beside it.

The loss of every step is that of the whole data before the update, in eval mode: what is trained is what is
measured. Steps are θ ← θ − η ∇L (`gd`), or those of torch's Adam and AdamW.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from curvescope.core.errors import UsageError
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.models.model import Model
from curvescope.monitor import CurvatureMonitor
from curvescope.monitor.result import Monitored
from curvescope.problem import Problem

Optimizer = Literal["gd", "adam", "adamw"]
NOTHING = np.zeros(0)


class Recipe(NamedTuple):
    """How to train: η rises linearly over `warmup` steps and stays."""

    optimizer: Optimizer
    lr: float
    steps: int
    warmup: int = 0
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def rate(self, step: int) -> float:
        """η of a step, the first of which is 0."""
        return self.lr * min(1.0, (step + 1) / max(self.warmup, 1))


@dataclass(frozen=True)
class Course(Result):
    """A run: its loss at every step, and what the monitor saw at some."""

    name: str
    seed: int
    optimizer: str
    lr: np.ndarray  # (S,) of each step
    loss: np.ndarray  # (S + 1,) before each step, and behind the last; fewer where it stopped being finite
    seen: Monitored
    evaluated: np.ndarray = field(default_factory=lambda: NOTHING)  # (E,) steps
    accuracy: np.ndarray = field(default_factory=lambda: NOTHING)  # (E,) on the data
    held_out_loss: np.ndarray = field(default_factory=lambda: NOTHING)  # (E,)
    held_out_accuracy: np.ndarray = field(default_factory=lambda: NOTHING)  # (E,)

    def column(self, name: str) -> np.ndarray:
        """A number of every measurement, see `monitor.columns`."""
        return self.seen.history[name]

    @property
    def measured(self) -> np.ndarray:
        """Steps of the measurements."""
        return self.seen.history["step"].astype(int)


def follow(
    problem: Problem,
    recipe: Recipe,
    *,
    every: int,
    name: str = "run",
    seed: int = 0,
    num_probes: int = 4,
    evaluate: Callable[[Model], tuple[float, float, float]] | None = None,
) -> Course:
    """Train a copy of the problem's model, and measure before every `every`-th step and behind the last.

    Args:
        evaluate: (accuracy, held-out loss, held-out accuracy) of the model; asked at every measurement.
    """
    model = _copy(problem.model)
    own = Problem(model, problem.batches, problem.loss)
    optimizer = make_optimizer(model, recipe)
    monitor = CurvatureMonitor(
        model, problem.batches, problem.loss, every=every, budget=1.0, seed=seed, blocks=False,
        num_probes=num_probes, raise_errors=True,
    )  # fmt: skip
    losses, rates, evaluated = [], [], []
    for step in track(range(recipe.steps + 1), name):
        rate = recipe.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        value = accumulate(own, optimizer)
        losses.append(value)
        if not math.isfinite(value):
            break
        if step % every == 0 or step == recipe.steps:
            monitor.measure(step, optimizer=optimizer)
            if evaluate is not None:
                evaluated.append((step, *evaluate(model)))
        if step < recipe.steps:
            rates.append(rate)
            optimizer.step()
    columns = np.array(evaluated, float).T if evaluated else np.zeros((4, 0))
    return Course(name, seed, recipe.optimizer, np.array(rates), np.array(losses), monitor.result(), *columns)


def accumulate(problem: Problem, optimizer: torch.optim.Optimizer) -> float:
    """L(θ), and ∇L(θ) in the parameters' `.grad`: the sum over all batches, divided once."""
    optimizer.zero_grad(set_to_none=True)
    model, total, N = problem.model, 0.0, problem.num_terms
    for batch in problem.batches:
        batch = batch.map(lambda t: t.to(model.device, model.dtype if t.is_floating_point() else None))
        value = problem.loss.sum(model.forward({}, batch.inputs), batch.targets, batch.weights) / N
        value.backward()
        total += float(value.detach())
    return total


def make_optimizer(model: Model, recipe: Recipe) -> torch.optim.Optimizer:
    """One of torch's; `gd` is SGD, on all the data."""
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    if not parameters:
        raise UsageError(f"expected a model with parameters to train, all of {model.name!r} are frozen")
    if recipe.optimizer == "gd":
        return torch.optim.SGD(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay)
    kind = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
    betas = (recipe.beta1, recipe.beta2)
    return kind(parameters, lr=recipe.lr, betas=betas, weight_decay=recipe.weight_decay)


def _copy(model: Model) -> Model:
    """In eval mode, so that dropout does not make another loss of the one that is measured."""
    return replace(model, module=copy.deepcopy(model.module).eval())
