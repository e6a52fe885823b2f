"""Random estimates of a diagonal of curvature, from the loss of one step.

    hutchinson   z ⊙ (H z), z of random signs: its mean is diag H (Bekas et al., 2007)
    ggn          z ⊙ (G z), with the GGN, of which no entry of the mean is negative
    bartlett     N ĝ ⊙ ĝ, ĝ the gradient of the mean loss of N terms at targets drawn from the model: its mean
                 is diag G for a log-likelihood whose terms weigh 0 or 1 (Liu et al., 2024, algorithm 2)

On a matrix that is diagonal the first two are exact with one vector z.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.seeds import generator, probes
from curvescope.optim.objective import Objective, unflatten

Estimate = Literal["hutchinson", "ggn", "bartlett"]


def diagonal_of(
    objective: Objective, estimate: Estimate, *, num_probes: int, seed: int, step: int
) -> list[Tensor]:
    """A mean over draws that depend on (seed, step) alone; the gradient's graph has to be there."""
    draw = _bartlett if estimate == "bartlett" else partial(_signs, estimate)
    found = [draw(objective, seed, i) for i in range(step * num_probes, (step + 1) * num_probes)]
    return [torch.stack(parts).mean(0) for parts in zip(*found, strict=True)]


def _signs(estimate: Estimate, objective: Objective, seed: int, draw: int) -> list[Tensor]:
    parameters = objective.parameters
    n, first = sum(p.numel() for p in parameters), parameters[0]
    z = unflatten(
        probes(n, 1, seed=seed, first=draw, dtype=first.dtype, device=first.device)[:, 0], parameters
    )
    image = objective.product(z, "ggn" if estimate == "ggn" else "hessian")
    return [a * b for a, b in zip(z, image, strict=True)]


def _bartlett(objective: Objective, seed: int, draw: int) -> list[Tensor]:
    problem = objective.problem
    if problem is None:
        raise UsageError(
            "estimate='bartlett' draws targets from the model, for which it needs the loss and its terms",
            hint="return a cs.Problem from the closure, or use estimate='ggn'",
        )
    with torch.enable_grad():
        sums = []
        for i, (z, batch) in enumerate(zip(objective.outputs, problem.placed_batches("draws"), strict=True)):
            targets = problem.loss.sample_targets(z.detach(), batch.targets, generator(seed, draw, i))
            sums.append(problem.loss.sum(z, targets, batch.weights))
        loss = torch.stack(sums).sum() / problem.num_terms
    return [g.square() * problem.num_terms for g in objective.drawn_gradient(loss)]
