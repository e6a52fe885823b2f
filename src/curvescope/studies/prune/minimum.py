"""A block at a minimum of its own, where saliencies have no gradient to miss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from curvescope.core.result import Result
from curvescope.problem import Problem
from curvescope.studies.weight_changes import moved_parameters, weights


@dataclass(frozen=True)
class Minimum(Result):
    """Where a descent over one block has come to."""

    delta: np.ndarray  # (n,) from the model's own weights
    loss: np.ndarray  # (2,) at the beginning and at the end
    gradient_norm: np.ndarray  # (2,)
    evaluations: int


def descend(problem: Problem, block: str, evaluations: int) -> Minimum:
    """L-BFGS over the weights of a block, on the data of the problem, for at most so many gradients."""
    from scipy.optimize import minimize

    start = weights(problem, block)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        delta = torch.as_tensor(x).to(start)
        here = problem.at(moved_parameters(problem, block, delta))
        return here.loss_value(), here.gradient(block).double().cpu().numpy()

    first, slope = loss(np.zeros(len(start)))
    options = {"maxfun": evaluations, "maxiter": evaluations, "ftol": 0.0, "gtol": 1e-8, "maxcor": 30}
    found = minimize(loss, np.zeros(len(start)), jac=True, method="L-BFGS-B", options=options)
    norms = np.array([np.linalg.norm(slope), np.linalg.norm(found.jac)])
    return Minimum(found.x, np.array([first, found.fun]), norms, int(found.nfev) + 1)
