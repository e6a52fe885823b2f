"""What a product computes of one batch: built once, then called with tangents.

A work holds the graph that does not depend on the directions: that of the gradient for a second derivative,
that of Jᵀu for products with J. Nothing here knows spaces or the division by the number of terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from curvescope.data.batches import Batch
from curvescope.engines.passes import Linearised, gradient, linearise, pull
from curvescope.engines.run import Runner
from curvescope.kernels.head import LinearHead
from curvescope.losses.base import Part
from curvescope.problem import Leaves, Problem

Work = Callable[[Sequence[Tensor], int], Sequence[Tensor | None]]
"""Tangents (k, *shape) in the order of the columns, and how many to treat at once, to results in that of
the rows."""
Names = tuple[str, ...]


def second_derivative(
    problem: Problem, runner: Runner, batch: Batch, part: Part, rows: Names, columns: Names
) -> Work:
    """∂²s/∂θ_rows ∂θ_cols, s the scalar of `part`."""

    def scalar(leaves: Leaves) -> Tensor:
        return _scalar(problem, batch, part, runner.outputs(batch, leaves, second_order=True, lazy=True))

    leaves, s = problem.differentiable(_union(rows, columns), scalar, lambda s: [s])
    first, into = gradient(s, [leaves[name] for name in columns]), [leaves[name] for name in rows]
    return lambda v, group: pull(first, v, into, group)


def ggn(problem: Problem, runner: Runner, batch: Batch, rows: Names, columns: Names) -> Work:
    """Jᵀ (∂²loss/∂z²) J."""
    loss = problem.loss
    graph = linearised(problem, runner, batch, rows, columns, lazy=True)
    fixed = [None if x is None else x.detach() for x in graph.outputs]
    curvature: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
    if len(fixed) == 1:
        z, terms = there(fixed[0]), (batch.targets, batch.weights)
        curvature = lambda moved: [loss.hessian_product(z, *terms, moved[0])]  # noqa: E731
    else:
        head = LinearHead(there(fixed[0]), there(fixed[1]), fixed[2])
        curvature = loss.head_curvature(head, batch.targets, batch.weights)
    into = [graph.leaves[name] for name in rows]
    return lambda v, group: pull(graph.outputs, curvature(graph.push(v, group)), into, group)


def linearised(
    problem: Problem, runner: Runner, batch: Batch, rows: Names, columns: Names, *, lazy: bool
) -> Linearised:
    """The outputs as a function of leaves, with what J v and Jᵀu need."""

    def outputs(leaves: Leaves) -> tuple[Tensor | None, ...]:
        z = runner.outputs(batch, leaves, second_order=False, lazy=lazy)
        return (z,) if isinstance(z, Tensor) else tuple(z)

    leaves, found = problem.differentiable(_union(rows, columns), outputs, lambda found: found)
    return linearise(leaves, found, columns)


def _scalar(problem: Problem, batch: Batch, part: Part, z: Tensor | LinearHead) -> Tensor:
    """The loss, or ⟨∂loss/∂z held fixed, z⟩: a number whose second derivative is asked for."""
    loss = problem.loss
    if isinstance(z, LinearHead):
        return loss.head_sum(z, batch.targets, batch.weights, part=part)
    if part == "hessian":
        return loss.sum(z, batch.targets, batch.weights)
    return (loss.gradient(z.detach(), batch.targets, batch.weights) * z).sum()


def there(x: Tensor | None) -> Tensor:
    """A tensor that cannot be missing."""
    assert isinstance(x, torch.Tensor)
    return x


def _union(first: Names, second: Names) -> Names:
    return tuple(dict.fromkeys(first + second))
