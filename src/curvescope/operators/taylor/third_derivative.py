"""Third derivatives of a problem along a direction: the change of its curvature.

    ∇³L[u,u,·] = ∇_θ (uᵀ H(θ) u),     ∇³L[u,u,u] = d/dt uᵀ H(θ + t u) u at t = 0,

so that L(θ + t u) = L + t ∇L·u + (t²/2) uᵀHu + (t³/6) ∇³L[u,u,u] + O(t⁴).

Three reverse passes are silently wrong through some of torch's norms. So `kernels.norms.plain_norms` replaces
every norm of the module by plain arithmetic while the graph is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import CurvescopeError, ShapeError, UsageError
from curvescope.core.result import Result
from curvescope.core.tensors import once_differentiable_node
from curvescope.data.batches import Batch
from curvescope.kernels.function_mode import PlainAttention
from curvescope.kernels.norms.plain_norms import plain_norms, refuse_fused_norms
from curvescope.models.parameter_selection import Params
from curvescope.problem import Leaves, Problem, check_finite


@dataclass(frozen=True)
class ThirdDerivative(Result):
    """∇³L along a direction u."""

    value: float  # ∇³L[u,u,u]
    vector: Tensor  # ∇³L[u,u,·], (n,), in the order of u


def third_derivative(problem: Problem, u: Tensor, *blocks: Params) -> ThirdDerivative:
    """Compute ∇³L[u,u,u] and ∇³L[u,u,·] over the blocks that match the globs, by default all.

    `u` is a vector (n,) of `problem.space(*blocks)`, and so is ∇³L[u,u,·]. Batches are read once, one at a
    time, and the model is not changed. Time and memory equal those of a few Hessian-vector products.
    """
    if not isinstance(problem, Problem):
        raise UsageError(f"expected a cs.Problem, got {type(problem).__name__}")
    space = problem.space(*blocks)
    _check_direction(u, space)
    with torch.inference_mode(False), torch.enable_grad():  # independent of the caller's mode
        direction = space.scatter(u.detach())
        total = torch.zeros(space.size, dtype=space.dtype, device=space.device)
        for batch in problem.placed_batches("third derivative"):
            total += space.gather(_batch_third(problem, batch, direction))
    total /= problem.num_terms
    check_finite(total, problem)
    return ThirdDerivative(float(total @ u.detach()), total)


def _batch_third(problem: Problem, batch: Batch, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Σ over one batch's terms of ∇³ℓ[u,u,·], by parameter; not divided."""

    def loss(leaves: Leaves) -> Tensor:
        with plain_norms(), PlainAttention():
            return problem.loss.sum(problem.outputs(batch, leaves), batch.targets, batch.weights)

    leaves, s = problem.differentiable(tuple(direction), loss, lambda s: [s])
    for _ in range(2):
        tree = _reverse(s, leaves, create_graph=True)
        if not tree:
            return {}
        s = torch.stack([(g * direction[name]).sum() for name, g in tree.items()]).sum()
    return _reverse(s, leaves, create_graph=False)


def _reverse(s: Tensor, leaves: Mapping[str, Tensor], *, create_graph: bool) -> dict[str, Tensor]:
    """Gradients of s, by name; a leaf that it does not depend on is missing."""
    if not s.requires_grad:
        return {}
    _refuse_wrong_nodes(s)
    try:
        gradients = torch.autograd.grad(
            s, list(leaves.values()), create_graph=create_graph, allow_unused=True
        )
    except RuntimeError as error:
        if not any(word in str(error) for word in ("derivative", "double backward")):
            raise
        raise CurvescopeError(
            f"the module cannot be differentiated three times: {str(error).splitlines()[0]}",
            hint="switch it to plain attention, e.g. attn_implementation='eager', and turn compilation off",
        ) from error
    return {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}


def _check_direction(u: Any, space: ParamSpace) -> None:
    if not isinstance(u, Tensor) or u.shape != (space.size,):
        got = tuple(u.shape) if isinstance(u, Tensor) else type(u).__name__
        raise ShapeError(
            f"expected a direction u of {space.size} entries, got {got}",
            hint=space.hint,
        )
    if u.dtype != space.dtype or u.device.type != space.device.type:
        raise ShapeError(
            f"expected {space.dtype} on {space.device}, got {u.dtype} on {u.device}",
            hint="u.to(dtype=problem.dtype, device=problem.device)",
        )


def _refuse_wrong_nodes(s: Tensor) -> None:
    """Raise if the graph contains a norm that was not replaced, or an operation differentiable only once.

    The norm comes from scripted code or torch.ops, and torch's third derivative of it would be wrong. The
    operation is marked `@once_differentiable`, and torch would silently treat its gradient as constant.
    """
    if once_differentiable_node(s) is not None:
        raise CurvescopeError(
            "the module cannot be differentiated three times: an operation is @once_differentiable",
            hint="write its backward pass in operations that torch can differentiate",
        )
    refuse_fused_norms(s)
