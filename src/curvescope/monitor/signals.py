"""Numbers that tell causes apart and need no product: log V, and the optimizer's moments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvescope.problem import Problem

SECOND_MOMENTS = ("exp_avg_sq", "square_avg")  # names in the state of Adam's kind and of RMSprop


def read_signals(problem: Problem, optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    """Log V of the problem, and the coarsest resolution of the optimizer's second moments."""
    batch = problem.batches[0].map(problem.placed)
    with torch.no_grad():
        numbers = {"uniform_loss": uniform_loss(problem, problem.outputs(batch[:1]))}
    if optimizer is not None and math.isfinite(resolution := moment_resolution(optimizer)):
        numbers["moment_resolution"] = resolution
    return numbers


def uniform_loss(problem: Problem, z: Tensor) -> float:
    """log V, the cross-entropy of outputs z that prefer nothing; nan for another loss, and for a sum."""
    axis = problem.loss.class_axis(z)
    return math.nan if axis is None or not problem.loss.is_mean else math.log(z.shape[axis])


def moment_resolution(optimizer: torch.optim.Optimizer) -> float:
    """(1 − β₂) over the rounding unit of the second moments, the least of all parameters; inf without any."""
    least = math.inf
    for group in optimizer.param_groups:
        beta2 = group["betas"][1] if "betas" in group else group.get("alpha")
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            moment = next((state[name] for name in SECOND_MOMENTS if name in state), None)
            if isinstance(moment, Tensor) and isinstance(beta2, float):
                least = min(least, (1 - beta2) / (torch.finfo(moment.dtype).eps / 2))
    return least
