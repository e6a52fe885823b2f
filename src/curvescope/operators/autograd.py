"""The autograd engine: reverse over reverse, which is right for every twice-differentiable module.

Forward modes are avoided on purpose: reverse-over-forward is silently wrong through `F.layer_norm`, and
several fused operations have no forward rule. J v comes from two reverse passes: Jᵀu is linear
in u, so its derivative in u, contracted with v, is J v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.data.batches import Batch
from curvescope.operators.engine import Engine, Scalar, Tree
from curvescope.operators.graph import once_differentiable_node
from curvescope.operators.memory import directions_per_pass
from curvescope.problem import Problem


class AutogradEngine(Engine):
    """Double backward. The graph that does not depend on the directions is built once per batch."""

    name = "autograd"

    def __init__(self) -> None:
        self._group: int | None = None

    def second_derivative(
        self,
        problem: Problem,
        batch: Batch,
        scalar: Scalar,
        rows: tuple[str, ...],
        tangents: Mapping[str, Tensor],
    ) -> Tree:
        leaves = problem.leaves(_union(rows, tuple(tangents)))
        s = scalar(problem.outputs(batch, leaves))
        if not s.requires_grad:
            return {}
        refuse_once_differentiable(s)
        columns = [leaves[name] for name in tangents]
        first = torch.autograd.grad(s, columns, create_graph=True, allow_unused=True)
        group = self.directions_at_once(problem, batch)
        return pull(first, list(tangents.values()), {name: leaves[name] for name in rows}, group)

    def jacobian(
        self, problem: Problem, batch: Batch, tangents: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        leaves = problem.leaves(tuple(tangents))
        z = problem.outputs(batch, leaves)
        return z.detach(), push(z, leaves, tangents, self.directions_at_once(problem, batch))

    def jacobian_transpose(
        self, problem: Problem, batch: Batch, rows: tuple[str, ...], cotangents: Tensor
    ) -> Tree:
        leaves = problem.leaves(rows)
        group = self.directions_at_once(problem, batch)
        return pull([problem.outputs(batch, leaves)], [cotangents], leaves, group)

    def sandwich(
        self,
        problem: Problem,
        batch: Batch,
        middle: Callable[[Tensor, Tensor], Tensor],
        rows: tuple[str, ...],
        tangents: Mapping[str, Tensor],
    ) -> Tree:
        leaves = problem.leaves(_union(rows, tuple(tangents)))
        z = problem.outputs(batch, leaves)
        group = self.directions_at_once(problem, batch)
        Jv = push(z, {name: leaves[name] for name in tangents}, tangents, group)
        return pull([z], [middle(z.detach(), Jv)], {name: leaves[name] for name in rows}, group)

    def directions_at_once(self, problem: Problem, batch: Batch) -> int:
        """Found with the first batch, then kept."""
        if self._group is None:
            self._group = directions_per_pass(problem, batch)
        return self._group


def push(z: Tensor, leaves: Mapping[str, Tensor], tangents: Mapping[str, Tensor], group: int) -> Tensor:
    """J v for k tangents: (k, *z.shape)."""
    k = next(iter(tangents.values())).shape[0]
    nothing = torch.zeros(k, *z.shape, dtype=z.dtype, device=z.device)
    if not z.requires_grad:
        return nothing
    refuse_once_differentiable(z)
    u = torch.zeros_like(z, requires_grad=True)
    pulled = torch.autograd.grad(z, list(leaves.values()), u, create_graph=True, allow_unused=True)
    return pull(pulled, list(tangents.values()), {"u": u}, group).get("u", nothing)


def pull(
    sources: Sequence[Tensor | None], cotangents: Sequence[Tensor], into: Mapping[str, Tensor], group: int
) -> Tree:
    """Σ_s cᵀ_s ∂source_s/∂leaf for each leaf and k cotangents c, `group` at a time: {leaf: (k, *shape)}."""
    pairs = [(s, c) for s, c in zip(sources, cotangents, strict=True) if s is not None and s.requires_grad]
    if not pairs or not pairs[0][1].shape[0]:
        return {}
    outputs, leaves = [s for s, _ in pairs], list(into.values())
    k = pairs[0][1].shape[0]
    parts = []
    for start in range(0, k, group):
        directions = [c[start : start + group] for _, c in pairs]
        parts.append(_grad(outputs, leaves, directions))
    return {
        name: torch.cat([part[i] for part in parts]) for i, name in enumerate(into) if parts[0][i] is not None
    }


def _grad(outputs: list[Tensor], leaves: list[Tensor], directions: list[Tensor]) -> list[Tensor | None]:
    """Gradients for directions (k, …) of the outputs: one pass for all of them, or one each."""
    k = directions[0].shape[0]
    if k > 1:
        try:
            return list(_reverse(outputs, leaves, directions, batched=True))
        except RuntimeError:
            pass  # an operation without a rule for batches; one by one gives the same numbers
    try:
        found = [_reverse(outputs, leaves, [d[j] for d in directions]) for j in range(k)]
    except RuntimeError as error:
        if "derivative" not in str(error) or "not implemented" not in str(error):
            raise
        raise CurvescopeError(
            f"the module uses an operation without a second derivative: {str(error).splitlines()[0]}",
            hint="switch it to plain attention, e.g. attn_implementation='eager'",
        ) from error
    return [None if part[0] is None else torch.stack(part) for part in zip(*found, strict=True)]


def _reverse(
    outputs: list[Tensor], leaves: list[Tensor], cotangents: list[Tensor], *, batched: bool = False
) -> tuple[Any, ...]:
    return torch.autograd.grad(
        outputs, leaves, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=batched
    )


def refuse_once_differentiable(z: Tensor) -> None:
    """Raise where z was made by a function marked @once_differentiable."""
    node = once_differentiable_node(z)
    if node is not None:
        raise CurvescopeError(
            "the module uses an operation without a second derivative: "
            f"{type(node).__name__} has only a first",
            hint="switch it to plain PyTorch operations",
        )


def _union(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(first + second))
