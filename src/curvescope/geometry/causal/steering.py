"""Interventions along directions: shift or project activations at a point and measure the effect.

    steer   x → x + α u        ablate   x → x − (x − μ) U Uᵀ,  U an orthonormal basis of the directions

for every token of the data at once. The module measures the loss, the distance between output distributions,
and the logits of chosen tokens minus their mean over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.result import Result
from curvescope.data.batches import Batch
from curvescope.models.capture.activation_points import find_point
from curvescope.models.capture.hook_sites import AddedActivation
from curvescope.problem import Problem, differentiating

Mean = Literal["zero", "data"]


@dataclass(frozen=True)
class Effect(Result):
    """Effect of an intervention for each of A strengths."""

    at: str
    alphas: np.ndarray  # (A,)
    loss: float  # of the unmodified model
    loss_change: np.ndarray  # (A,)
    kl: (
        np.ndarray
    )  # (A,) mean over tokens of KL(unmodified ‖ modified) in nats; nan if outputs are not logits
    logit_change: np.ndarray  # (A, k) mean over tokens for the watched ids, minus the vocabulary mean
    size: float  # root mean square over tokens of |δ| at α = 1


def steer(
    problem: Problem,
    at: str,
    direction: Tensor,
    alphas: Sequence[float] = (1.0,),
    *,
    watch: Sequence[int] = (),
) -> Effect:
    """Add α u to the activations of every token at a point.

    Args:
        problem: A `cs.Problem`.
        at: The point: `L3.mid`, `L2.h1.out`, …
        direction: u (w,), with any length.
        alphas: Strengths.
        watch: Ids of outputs whose logits are measured.
    """
    u = problem.placed(torch.as_tensor(direction).detach())

    def constant_step(x: Tensor) -> Tensor:
        if u.shape != x.shape[-1:]:
            raise ShapeError(f"expected a direction ({x.shape[-1]},) at {at!r}, got {tuple(u.shape)}")
        return u.expand_as(x)

    return intervene(problem, at, constant_step, alphas, watch=watch)


def ablate(
    problem: Problem, at: str, directions: Tensor, *, mean: Mean = "zero", watch: Sequence[int] = ()
) -> Effect:
    """Remove the part along some directions from the activations of every token at a point.

    Args:
        problem: A `cs.Problem`.
        at: The point.
        directions: One direction (w,) or several (m, w), which need not be orthogonal.
        mean: Replace that part by `zero`, or by its mean over the tokens of the `data`.
        watch: Ids of outputs whose logits are measured.
    """
    return intervene(problem, at, ablation(problem, at, directions, mean=mean), watch=watch)


def ablation(
    problem: Problem, at: str, directions: Tensor, *, mean: Mean = "zero"
) -> Callable[[Tensor], Tensor]:
    """Return δ = −(x − μ) U Uᵀ as a function of the activations x."""
    if mean not in ("zero", "data"):
        raise UsageError(f"mean: expected 'zero' or 'data', got {mean!r}")
    rows = problem.placed(torch.as_tensor(directions).detach())
    rows = rows[None] if rows.dim() == 1 else rows
    U, _ = torch.linalg.qr(rows.T)
    center = mean_activation(problem, at) if mean == "data" else torch.zeros_like(rows[0])
    return lambda x: -((x - center) @ U) @ U.T


def intervene(
    problem: Problem,
    at: str,
    delta: Callable[[Tensor], Tensor],
    alphas: Sequence[float] = (1.0,),
    *,
    watch: Sequence[int] = (),
) -> Effect:
    """Add α δ(x) to the activations x at a point, for every α."""
    N, count, size = problem.num_terms, 0, 0.0
    loss, sums, kl = 0.0, np.zeros(len(alphas)), np.zeros(len(alphas))
    logits = np.zeros((len(alphas), len(watch)))
    with differentiating(), torch.no_grad():
        for batch in problem.placed_batches(f"interventions at {at}"):
            x = problem.activations(batch, at)[at]
            delta_x, before = delta(x), problem.outputs(batch)
            loss += float(_loss(problem, batch, before))
            before = _classes_last(problem, before)
            tokens = before.shape[:-1].numel()
            count += tokens
            size += float(delta_x.double().square().sum()) / x.shape[:-1].numel() * tokens
            for i, alpha in enumerate(alphas):
                after = _shifted_outputs(problem, batch, at, alpha * delta_x)
                sums[i] += float(_loss(problem, batch, after))
                after = _classes_last(problem, after)
                kl[i] += np.nan if problem.loss.class_axis(after) is None else float(_kl(before, after))
                change = (after - before).double()
                centered = change[..., list(watch)] - change.mean(-1, keepdim=True)
                logits[i] += centered.flatten(0, -2).sum(0).cpu().numpy()
    return Effect(
        at,
        np.array(alphas, dtype=float),
        loss / N,
        (sums - loss) / N,
        kl / count,
        logits / count,
        float(np.sqrt(size / count)),
    )


def mean_activation(problem: Problem, at: str) -> Tensor:
    """Return the mean of x over all tokens of the data: (w,)."""
    total, count = torch.zeros(()), 0
    for batch in problem.placed_batches(f"mean at {at}"):
        x = problem.activations(batch, at)[at]
        total = total + x.reshape(-1, x.shape[-1]).sum(0)
        count += x.shape[:-1].numel()
    return total / count


def spread_along(problem: Problem, at: str, directions: Tensor) -> np.ndarray:
    """Return the standard deviation over all tokens of x · u, for directions (m, w): (m,)."""
    u = problem.placed(torch.as_tensor(directions).detach())
    parts = []
    for batch in problem.placed_batches(f"spread at {at}"):
        x = problem.activations(batch, at)[at]
        parts.append((x.reshape(-1, x.shape[-1]) @ u.T).double().cpu())
    return torch.cat(parts).std(0, correction=0).numpy()


def _shifted_outputs(problem: Problem, batch: Batch, at: str, delta: Tensor) -> Tensor:
    added = AddedActivation(find_point(problem.model, at), batch.num_sequences, delta)
    outputs = problem.outputs(batch, changes=added.changes())
    added.check()
    return outputs


def _loss(problem: Problem, batch: Batch, z: Tensor) -> Tensor:
    return problem.loss.sum(z, batch.targets, batch.weights)


def _classes_last(problem: Problem, z: Tensor) -> Tensor:
    """Return outputs with the classes of logits on the last axis; other outputs unchanged."""
    axis = problem.loss.class_axis(z)
    return z if axis is None else z.movedim(axis, -1)


def _kl(before: Tensor, after: Tensor) -> Tensor:
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum()
