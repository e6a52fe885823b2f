"""The autograd engine: reverse over reverse, which is right for every twice-differentiable module.

Forward modes are avoided on purpose: reverse-over-forward is silently wrong through `F.layer_norm`, and
several fused operations have no forward rule. J v comes from two reverse passes: Jᵀu is linear
in u, so its derivative in u, contracted with v, is J v. The graph of the gradient, and that of Jᵀu, do not
depend on the directions: they are built once per batch and kept while memory allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvescope.core.errors import CurvescopeError
from curvescope.data.batches import Batch
from curvescope.kernels.head import LinearHead
from curvescope.losses.base import Part
from curvescope.operators.checkpoint import Context, checkpointed
from curvescope.operators.engine import Engine, Middle, Tree, Work
from curvescope.operators.graph import once_differentiable_node
from curvescope.operators.kept import Kept
from curvescope.operators.memory import directions_per_pass, result_bytes
from curvescope.problem import Problem

GRAPH_SIZE = 4  # of the gradient's graph, in units of the forward pass's results


@dataclass(frozen=True)
class Linearised:
    """Outputs, and Jᵀu as a function of cotangents u: one tensor z, or what a linear head makes it from."""

    leaves: Mapping[str, Tensor]
    outputs: tuple[Tensor | None, ...]
    cotangents: tuple[Tensor | None, ...]
    pulled: Sequence[Tensor | None]

    def push(self, tangents: Sequence[Tensor], group: int) -> tuple[Tensor, ...]:
        """J v for k tangents, for every output that is there: (k, *shape)."""
        k = tangents[0].shape[0]
        moved = iter(pull(self.pulled, tangents, [u for u in self.cotangents if u is not None], group))
        found = [None if u is None else next(moved) for u in self.cotangents]
        return tuple(
            x.new_zeros(k, *x.shape) if Jv is None else Jv
            for x, Jv in zip(self.outputs, found, strict=True)
            if x is not None
        )


class AutogradEngine(Engine):
    """Double backward of the module as it is.

    Args:
        checkpoint: whether layers are computed again instead of being kept.
    """

    name = "autograd"

    def __init__(self, *, checkpoint: bool = False) -> None:
        self._kept, self._checkpoint = Kept(), checkpoint
        self._group: int | None = None
        self._bytes_per_sequence = 0.0

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return self._kept.lock

    def begin(self, problem: Problem) -> None:
        self._kept.begin(problem)

    def valid(self) -> bool:
        return self._kept.valid()

    def outputs(
        self, problem: Problem, batch: Batch, leaves: Mapping[str, Tensor], *, second_order: bool, lazy: bool
    ) -> Tensor | LinearHead:
        """The outputs z as a function of the leaves.

        Args:
            second_order: whether they will be differentiated twice, or only once (and Jᵀu in u).
            lazy: whether the last linear map may be left to the loss.
        """
        plain = partial(sdpa_kernel, SDPBackend.MATH)  # PyTorch's other attention has no second derivative
        with plain(), self._layers(problem, plain):
            return problem.outputs(batch, leaves)

    def _layers(self, problem: Problem, inside: Context) -> AbstractContextManager[None]:
        """What the module is called in: its layers checkpointed where that was asked for."""
        return checkpointed(problem.model, inside) if self._checkpoint else nullcontext()

    # ------------------------------------------------------------------------------- second derivatives

    def second_derivative(
        self,
        problem: Problem,
        index: int,
        batch: Batch,
        part: Part,
        rows: tuple[str, ...],
        tangents: Mapping[str, Tensor],
    ) -> Tree:
        columns, group = tuple(tangents), self._directions(problem, batch)

        def build() -> Work:
            leaves = problem.leaves(_union(rows, columns))
            z = self.outputs(problem, batch, leaves, second_order=True, lazy=True)
            first = _gradient(_scalar(problem, batch, part, z), [leaves[name] for name in columns])
            return lambda v: pull(first, v, [leaves[name] for name in rows], group)

        work = self._keep((index, part, rows, columns), build, problem, batch)
        return _tree(rows, work(list(tangents.values())))

    # ------------------------------------------------------------------------------- products with J and Jᵀ

    def ggn(
        self,
        problem: Problem,
        index: int,
        batch: Batch,
        rows: tuple[str, ...],
        tangents: Mapping[str, Tensor],
    ) -> Tree:
        loss, columns, group = problem.loss, tuple(tangents), self._directions(problem, batch)

        def build() -> Work:
            graph = self._linearised(problem, batch, rows, columns, lazy=True)
            fixed = [None if x is None else x.detach() for x in graph.outputs]
            curvature: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
            if len(fixed) == 1:
                z, terms = _there(fixed[0]), (batch.targets, batch.weights)
                curvature = lambda moved: [loss.hessian_product(z, *terms, moved[0])]  # noqa: E731
            else:
                head = LinearHead(_there(fixed[0]), _there(fixed[1]), fixed[2])
                curvature = loss.head_curvature(head, batch.targets, batch.weights)
            into = [graph.leaves[name] for name in rows]
            return lambda v: pull(graph.outputs, curvature(graph.push(v, group)), into, group)

        work = self._keep((index, "ggn", rows, columns), build, problem, batch)
        return _tree(rows, work(list(tangents.values())))

    def sandwich(
        self,
        problem: Problem,
        index: int,
        batch: Batch,
        middle: Middle,
        rows: tuple[str, ...],
        tangents: Mapping[str, Tensor],
    ) -> Tree:
        columns, group = tuple(tangents), self._directions(problem, batch)

        def build() -> Linearised:
            return self._linearised(problem, batch, rows, columns, lazy=False)

        graph = self._keep((index, "sandwich", rows, columns), build, problem, batch)
        (z,), (Jv,) = graph.outputs, graph.push(list(tangents.values()), group)
        into = [graph.leaves[name] for name in rows]
        return _tree(rows, pull([z], [middle(z.detach(), Jv)], into, group))

    def jacobian(
        self, problem: Problem, batch: Batch, tangents: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        graph = self._linearised(problem, batch, (), tuple(tangents), lazy=False)
        (z,), (Jv,) = graph.outputs, graph.push(list(tangents.values()), self._directions(problem, batch))
        return _there(z).detach(), Jv

    def jacobian_transpose(
        self, problem: Problem, batch: Batch, rows: tuple[str, ...], cotangents: Tensor
    ) -> Tree:
        leaves = problem.leaves(rows)
        z = self.outputs(problem, batch, leaves, second_order=False, lazy=False)
        assert isinstance(z, Tensor)
        group = self._directions(problem, batch)
        return _tree(rows, pull([z], [cotangents], [leaves[name] for name in rows], group))

    def _linearised(
        self, problem: Problem, batch: Batch, rows: tuple[str, ...], columns: tuple[str, ...], *, lazy: bool
    ) -> Linearised:
        leaves = problem.leaves(_union(rows, columns))
        z = self.outputs(problem, batch, leaves, second_order=False, lazy=lazy)
        outputs = (z,) if isinstance(z, Tensor) else tuple(z)
        moving = [x for x in outputs if x is not None and x.requires_grad]
        for x in moving:
            refuse_once_differentiable(x)
        u = {id(x): torch.zeros_like(x, requires_grad=True) for x in moving}
        wanted = [leaves[name] for name in columns]
        pulled: Sequence[Tensor | None] = [None] * len(wanted)
        if moving and wanted:
            given = [u[id(x)] for x in moving]
            pulled = torch.autograd.grad(moving, wanted, given, create_graph=True, allow_unused=True)
        return Linearised(leaves, outputs, tuple(u.get(id(x)) for x in outputs), pulled)

    # ------------------------------------------------------------------------------- memory

    def _keep(self, key: Any, build: Callable[[], Any], problem: Problem, batch: Batch) -> Any:
        self._directions(problem, batch)
        size = int(GRAPH_SIZE * self._bytes_per_sequence * batch.num_sequences)
        return self._kept.get(key, build, device=problem.device, size=size)

    def _directions(self, problem: Problem, batch: Batch) -> int:
        """Directions at once; found with the first batch, then kept."""
        if self._group is None:
            results = result_bytes(lambda: self.outputs(problem, batch, {}, second_order=False, lazy=True))
            self._bytes_per_sequence = results / batch.num_sequences
            self._group = 1 if self._checkpoint else directions_per_pass(problem, results)
        return self._group


def _gradient(s: Tensor, wanted: list[Tensor]) -> Sequence[Tensor | None]:
    """∂s/∂wanted, to be differentiated again; None where s does not depend on it."""
    if not s.requires_grad:
        return [None] * len(wanted)
    refuse_once_differentiable(s)
    return torch.autograd.grad(s, wanted, create_graph=True, allow_unused=True)


def _scalar(problem: Problem, batch: Batch, part: Part, z: Tensor | LinearHead) -> Tensor:
    """The loss, or ⟨∂loss/∂z held fixed, z⟩: a number whose second derivative is asked for."""
    loss = problem.loss
    if isinstance(z, LinearHead):
        return loss.head_sum(z, batch.targets, batch.weights, part=part)
    if part == "hessian":
        return loss.sum(z, batch.targets, batch.weights)
    return (loss.gradient(z.detach(), batch.targets, batch.weights) * z).sum()


def pull(
    sources: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    into: Sequence[Tensor],
    group: int,
) -> Sequence[Tensor | None]:
    """Σ_s cᵀ_s ∂source_s/∂leaf for each leaf and k cotangents c, `group` at a time: (k, *shape) each."""
    pairs = [
        (s, c)
        for s, c in zip(sources, cotangents, strict=True)
        if s is not None and c is not None and s.requires_grad
    ]
    if not pairs or not pairs[0][1].shape[0]:
        return [None] * len(into)
    outputs, leaves = [s for s, _ in pairs], list(into)
    k = pairs[0][1].shape[0]
    parts = []
    for start in range(0, k, group):
        directions = [c[start : start + group] for _, c in pairs]
        parts.append(_grad(outputs, leaves, directions))
    if len(parts) == 1:
        return parts[0]
    return [None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)]


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
    if k == 1:
        return [None if part is None else part[None] for part in found[0]]
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


def _tree(names: tuple[str, ...], found: Sequence[Tensor | None]) -> Tree:
    return {name: x for name, x in zip(names, found, strict=True) if x is not None}


def _there(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _union(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(first + second))
