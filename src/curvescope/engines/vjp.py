"""Reverse passes through a stored graph: Jᵀu, J v, and the derivative of a gradient.

Forward modes are avoided on purpose: reverse-over-forward is silently wrong through `F.layer_norm`, and
several fused operations have no forward rule. J v comes from two reverse passes: Jᵀu is linear
in u, so its derivative in u, contracted with v, is J v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvescope.core.errors import CurvescopeError
from curvescope.core.tensors import once_differentiable_node, receive_gradients
from curvescope.models.running.eager import gradient_edge, without_tensor_hooks

Source = Tensor | GradientEdge
"""Source of a reverse pass: a tensor, or its graph edge if its values are not needed."""
Receive = Callable[[str, Tensor], object]
"""Function of the name of a leaf and its result (k, *shape), which it must copy: the buffer is reused."""


@dataclass(frozen=True)
class Linearized:
    """Outputs, and Jᵀu as a function of cotangents u: one tensor z, or the inputs of a linear head."""

    leaves: Mapping[str, Tensor]
    outputs: tuple[Tensor | None, ...]
    cotangents: tuple[Tensor | None, ...]
    pulled: Sequence[Source | None]

    def push(self, tangents: Sequence[Tensor], group: int) -> tuple[Tensor, ...]:
        """J v for k tangents, (k, *shape) for every output that is not None."""
        k = tangents[0].shape[0]
        results = iter(pull(self.pulled, tangents, [u for u in self.cotangents if u is not None], group))
        tangents_out = [None if u is None else next(results) for u in self.cotangents]
        return tuple(
            x.new_zeros(k, *x.shape) if Jv is None else Jv
            for x, Jv in zip(self.outputs, tangents_out, strict=True)
            if x is not None
        )


def linearize(
    leaves: Mapping[str, Tensor], outputs: tuple[Tensor | None, ...], columns: Sequence[str]
) -> Linearized:
    """Linearize outputs in leaves, for products with J along the columns and with Jᵀ."""
    moving = [x for x in outputs if x is not None and x.requires_grad]
    for x in moving:
        refuse_once_differentiable(x)
    u = {id(x): torch.zeros_like(x, requires_grad=True) for x in moving}
    inputs = [leaves[name] for name in columns]
    pulled: Sequence[Source | None] = [None] * len(inputs)
    if moving and inputs:
        pulled = _derivative_edges(moving, inputs, [u[id(x)] for x in moving])
    return Linearized(leaves, outputs, tuple(u.get(id(x)) for x in outputs), pulled)


def gradient(s: Tensor, wanted: list[Tensor]) -> Sequence[Tensor | None]:
    """∂s/∂wanted, to be differentiated again; None where s does not depend on it."""
    if not s.requires_grad:
        return [None] * len(wanted)
    refuse_once_differentiable(s)
    with without_tensor_hooks(wanted):
        return torch.autograd.grad(s, wanted, create_graph=True, allow_unused=True)


def gradient_edges(s: Tensor, wanted: list[Tensor]) -> Sequence[GradientEdge | None]:
    """Return the graph edges of the derivatives, like `gradient`, without keeping any of their values."""
    if not s.requires_grad:
        return [None] * len(wanted)
    refuse_once_differentiable(s)
    return _derivative_edges([s], wanted, None)


def _derivative_edges(
    ends: list[Tensor], wanted: list[Tensor], cotangents: list[Tensor] | None
) -> list[GradientEdge | None]:
    """Build a graph of the derivatives in the wanted leaves, and return the edges where they appear.

    The values are freed one by one, because together they are as large as all parameters. Values for the
    module's own parameters are not freed, because these may have the user's hooks.
    """
    if not _are_ours(wanted) or not all(leaf.is_leaf for leaf in wanted):
        with without_tensor_hooks(wanted):
            return edges(torch.autograd.grad(ends, wanted, cotangents, create_graph=True, allow_unused=True))
    edges_: list[GradientEdge | None] = [None] * len(wanted)

    def note(number: int, derivative: Tensor) -> None:
        edges_[number] = _edge(derivative)

    receive_gradients(ends, wanted, note, cotangents=cotangents, create_graph=True)
    return edges_


def _are_ours(leaves: Sequence[Tensor]) -> bool:
    """Return True if leaves are distinct, and none is the module's own, which may have the user's hooks."""
    return len({id(leaf) for leaf in leaves}) == len(leaves) and not any(
        isinstance(leaf, nn.Parameter) for leaf in leaves
    )


def edges(sources: Sequence[Source | None]) -> list[GradientEdge | None]:
    """Return the graph edges of sources; a reverse pass needs only these, so the values may be freed."""
    return [_edge(s) for s in sources]


def _edge(source: Source | None) -> GradientEdge | None:
    if source is None or isinstance(source, GradientEdge):
        return source
    return gradient_edge(source) if source.requires_grad else None


def pull(
    sources: Sequence[Source | None],
    cotangents: Sequence[Tensor | None],
    into: Sequence[Tensor],
    group: int,
) -> Sequence[Tensor | None]:
    """Σ_s cᵀ_s ∂source_s/∂leaf for each leaf and k cotangents c, `group` at a time: (k, *shape) each."""
    return _pull(edges(sources), cotangents, list(into), group)


@final
class ReversePass:
    """Reverse passes from fixed sources into fixed leaves, for any cotangents.

    Args:
        sources: Tensors that are differentiated; their values are not stored.
        names: Names of the leaves. A name may occur twice: its results must be added.
        leaves: Tensors to differentiate in.
    """

    def __init__(self, sources: Sequence[Source | None], names: Sequence[str], leaves: Sequence[Tensor]):
        self._sources, self._names, self._leaves = edges(sources), names, list(leaves)
        self._free_leaves = _are_ours(leaves)

    def __call__(self, cotangents: Sequence[Tensor | None], group: int, receive: Receive) -> None:
        """Pass Σ_s cᵀ_s ∂source_s/∂leaf for k cotangents c to `receive`, as soon as a leaf's sum is complete.

        For a single cotangent, at most one result is in memory at a time. The module's own parameters are not
        touched, because they may have the user's gradients and hooks.
        """
        if not self._free_leaves or any(c is not None and len(c) != 1 for c in cotangents):
            gradients = _pull(self._sources, cotangents, self._leaves, group)
            for name, x in zip(self._names, gradients, strict=True):
                if x is not None:
                    receive(name, x)
            return
        outputs, given = _paired(self._sources, cotangents)
        if not outputs:
            return

        def hand_over(name: str, leaf: Tensor) -> None:
            if leaf.grad is not None:  # None means zero
                receive(name, leaf.grad[None])
                leaf.grad = None

        named = zip(self._names, self._leaves, strict=True)
        hooks = [leaf.register_post_accumulate_grad_hook(partial(hand_over, name)) for name, leaf in named]
        try:
            with _second_derivatives():
                torch.autograd.backward(
                    outputs, [c[0] for c in given], retain_graph=True, inputs=self._leaves
                )
        finally:
            for hook, leaf in zip(hooks, self._leaves, strict=True):
                hook.remove()
                leaf.grad = None


def _pull(
    sources: Sequence[GradientEdge | None],
    cotangents: Sequence[Tensor | None],
    into: list[Tensor],
    group: int,
) -> Sequence[Tensor | None]:
    outputs, given = _paired(sources, cotangents)
    if not given or not given[0].shape[0]:
        return [None] * len(into)
    parts = []
    for start in range(0, given[0].shape[0], group):
        parts.append(_grad(outputs, into, [c[start : start + group] for c in given]))
    if len(parts) == 1:
        return parts[0]
    return [None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)]


def _paired(
    sources: Sequence[GradientEdge | None], cotangents: Sequence[Tensor | None]
) -> tuple[list[GradientEdge], list[Tensor]]:
    """Sources in a graph, with their cotangents."""
    pairs = [(s, c) for s, c in zip(sources, cotangents, strict=True) if s is not None and c is not None]
    return [s for s, _ in pairs], [c for _, c in pairs]


def _grad(outputs: list[GradientEdge], leaves: list[Tensor], directions: list[Tensor]) -> list[Tensor | None]:
    """Gradients for directions (k, …) of the outputs, in one batched pass or in one pass each."""
    k = directions[0].shape[0]
    if k > 1:
        try:
            return list(_reverse(outputs, leaves, directions, batched=True))
        except RuntimeError:
            pass  # an operation without a batching rule; separate passes give the same numbers
    with _second_derivatives():
        gradients = [_reverse(outputs, leaves, [d[j] for d in directions]) for j in range(k)]
    if k == 1:
        return [None if part is None else part[None] for part in gradients[0]]
    return [None if part[0] is None else torch.stack(part) for part in zip(*gradients, strict=True)]


@contextmanager
def _second_derivatives() -> Iterator[None]:
    """Convert an error of an operation without a second derivative into a UsageError."""
    try:
        yield
    except RuntimeError as error:
        if "derivative" not in str(error) or "not implemented" not in str(error):
            raise
        message = str(error).splitlines()[0]
        raise CurvescopeError(
            f"the module uses an operation without a second derivative: {message}",
            hint="switch it to plain attention, e.g. attn_implementation='eager'"
            if "attention" in message
            else "write that operation in terms of twice-differentiable operations",
        ) from error


def _reverse(
    outputs: list[GradientEdge], leaves: list[Tensor], cotangents: list[Tensor], *, batched: bool = False
) -> tuple[Any, ...]:
    with without_tensor_hooks(leaves):
        return torch.autograd.grad(
            outputs, leaves, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )


def refuse_once_differentiable(z: Tensor) -> None:
    """Raise if z was made by a function marked @once_differentiable."""
    node = once_differentiable_node(z)
    if node is not None:
        raise CurvescopeError(
            "the module uses an operation without a second derivative: "
            f"{type(node).__name__} has only a first",
            hint="switch it to plain PyTorch operations",
        )
