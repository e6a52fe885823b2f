"""Products of one batch: built once as a graph, then called with tangents.

A batch product holds the graph that does not depend on the directions: that of the gradient for a second
derivative, that of Jᵀu for products with J. Nothing here knows spaces or the division by the number of terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvescope.core.hessian_terms import MatrixName
from curvescope.core.tensors import graph_leaves
from curvescope.data.batches import Batch
from curvescope.engines.module_runner import Runner
from curvescope.engines.vjp import Linearized, Receive, ReversePass, gradient_edges, linearize
from curvescope.kernels.head import LinearHead
from curvescope.kernels.linear import twin
from curvescope.losses.base import Part
from curvescope.models.capture.activation_points import find_point
from curvescope.models.capture.hook_sites import AddedActivation, HookSite
from curvescope.models.curvature_sources import repeated_layers
from curvescope.models.model import Model
from curvescope.models.running.patching import Change
from curvescope.problem import Leaves, Problem

BatchProduct = Callable[[Sequence[Tensor], int, Receive], None]
"""Function of tangents (k, *shape) in the order of the columns, the number of tangents per pass, and the
receiver of the results by name; results with the same name must be added.
"""
Names = tuple[str, ...]
TWINS_ON = ("cuda",)  # GPUs, to save memory; on a CPU the order of sums stays the same


def results(product: BatchProduct, tangents: Sequence[Tensor], rows: Names) -> list[Tensor | None]:
    """Return all results of a batch product, one tangent at a time, in the order of the rows."""
    by_name: dict[str, Tensor] = {}

    def receive(name: str, x: Tensor) -> None:
        by_name[name] = by_name[name] + x if name in by_name else x

    product(tangents, 1, receive)
    return [by_name.get(name) for name in rows]


def second_derivative(
    problem: Problem, runner: Runner, batch: Batch, part: Part, rows: Names, columns: Names
) -> BatchProduct:
    """∂²s/∂θ_rows ∂θ_cols, s the scalar of `part`."""
    graph = gradient_graph(problem, runner, batch, part, _union(rows, columns), columns)
    twins = [name for name in rows if name in graph.twins]
    into = [graph.leaves[name] for name in rows] + [graph.twins[name] for name in twins]
    return ReversePass(graph.first, (*rows, *twins), into)


class GradientGraph(NamedTuple):
    """Graph edges of ∂s/∂θ_cols, the leaves that they depend on, and the twins of those leaves."""

    first: Sequence[GradientEdge | None]
    leaves: Leaves
    twins: Leaves


def gradient_graph(
    problem: Problem,
    runner: Runner,
    batch: Batch,
    part: Part,
    names: Names,
    columns: Names,
    *,
    twins: bool = True,
    observe: Callable[[Tensor], object] = lambda s: None,
) -> GradientGraph:
    """Build the graph of ∂s/∂θ_cols, to differentiate in the named parameters; `observe` is called with s."""
    second: Leaves = {}

    def scalar(leaves: Leaves) -> Tensor:
        second.clear()
        if twins:
            second.update({name: twin(leaf) for name, leaf in leaves.items() if _has_twin(leaf)})
        return _scalar(problem, batch, part, runner.outputs(batch, leaves, second_order=True, lazy=True))

    leaves, s = problem.differentiable(names, scalar, lambda s: [s])
    observe(s)
    return GradientGraph(gradient_edges(s, [leaves[name] for name in columns]), leaves, second)


def _has_twin(leaf: Tensor) -> bool:
    """Return True if a leaf has a twin: on a GPU, if linear maps or recomputed layers need one."""
    return leaf.device.type in TWINS_ON and not isinstance(leaf, nn.Parameter)


def ggn(problem: Problem, runner: Runner, batch: Batch, rows: Names, columns: Names) -> BatchProduct:
    """Jᵀ (∂²loss/∂z²) J."""
    graph = linearized(problem, runner, batch, rows, columns, lazy=True)
    return _gauss_newton(problem, batch, graph, rows)


def in_activations(problem: Problem, runner: Runner, batch: Batch, part: MatrixName, at: str) -> BatchProduct:
    """Product with ∂²s/∂x², or its GGN, in the activations x at a point."""
    added = AddedActivation(find_point(problem.model, at), batch.num_sequences)
    outputs = partial(_shifted_outputs, problem, runner, batch, added, second_order=part != "ggn")
    if part == "ggn":
        _, z = problem.differentiable((), outputs, _output_tensors)
        graph = linearize({at: added.delta}, tuple(_output_tensors(z)), (at,))
        return _gauss_newton(problem, batch, graph, (at,))

    def scalar(leaves: Leaves) -> Tensor:
        return _scalar(problem, batch, part, outputs(leaves))

    _, s = problem.differentiable((), scalar, lambda s: [s])
    return ReversePass(gradient_edges(s, [added.delta]), (at,), [added.delta])


def activation_gradient(problem: Problem, runner: Runner, batch: Batch, at: str) -> Tensor:
    """∂s/∂x for the activations x at a point."""
    added = AddedActivation(find_point(problem.model, at), batch.num_sequences)

    def scalar(leaves: Leaves) -> Tensor:
        z = _shifted_outputs(problem, runner, batch, added, leaves, second_order=False)
        return _scalar(problem, batch, "hessian", z)

    _, s = problem.differentiable((), scalar, lambda s: [s])
    (gradient_,) = torch.autograd.grad(s, [added.delta], allow_unused=True) if s.requires_grad else (None,)
    return torch.zeros_like(added.delta) if gradient_ is None else gradient_


def _shifted_outputs(
    problem: Problem, runner: Runner, batch: Batch, added: AddedActivation, _: Leaves, *, second_order: bool
) -> Tensor | LinearHead:
    """Outputs with x + δ instead of the activations x at a point, without kernels if they bypass the
    point.
    """
    unpatched = _unpatched_layer(problem.model, added.point.write) if runner.checkpoint else []
    z = runner.outputs(
        batch, {}, second_order=second_order, lazy=True, more=lambda: [*unpatched, *added.changes()]
    )
    if added.count != 1 or (runner.checkpoint and not _depends_on(added.delta, z)):
        z = Runner(problem).outputs(batch, {}, second_order=True, lazy=False, more=added.changes)
    added.check()
    return z


def _unpatched_layer(model: Model, site: HookSite) -> list[Change]:
    """Return changes that exclude the layer around a site from recomputation, because δ is not an input of
    it.
    """
    for layer in repeated_layers(model.module):
        inside = layer.modules() if site.method else (part for part in layer.modules() if part is not layer)
        if any(part is site.owner for part in inside):
            return [Change(vars(layer), "forward", model.whole_forward(layer))]
    return []


def _depends_on(leaf: Tensor, z: Tensor | LinearHead) -> bool:
    """Return True if the graph of outputs begins with a leaf."""
    return any(node is leaf for end in _output_tensors(z) if end is not None for node in graph_leaves(end))


def _gauss_newton(problem: Problem, batch: Batch, graph: Linearized, rows: Names) -> BatchProduct:
    """Jᵀ (∂²loss/∂z²) J for the outputs of a graph."""
    loss, back = problem.loss, ReversePass(graph.outputs, rows, [graph.leaves[name] for name in rows])
    fixed = [None if x is None else x.detach() for x in graph.outputs]
    curvature: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
    if len(fixed) == 1:
        z, terms = required(fixed[0]), (batch.targets, batch.weights)
        curvature = lambda tangents_z: [loss.hessian_product(z, *terms, tangents_z[0])]  # noqa: E731
    else:
        head = LinearHead(required(fixed[0]), required(fixed[1]), fixed[2])
        curvature = loss.head_curvature(head, batch.targets, batch.weights)

    return lambda v, group, receive: back(curvature(graph.push(v, group)), group, receive)


def linearized(
    problem: Problem, runner: Runner, batch: Batch, rows: Names, columns: Names, *, lazy: bool
) -> Linearized:
    """Return the outputs as a function of leaves, with the graphs for J v and Jᵀu."""

    def outputs(leaves: Leaves) -> tuple[Tensor | None, ...]:
        return tuple(_output_tensors(runner.outputs(batch, leaves, second_order=False, lazy=lazy)))

    leaves, outputs_ = problem.differentiable(_union(rows, columns), outputs, lambda outputs_: outputs_)
    return linearize(leaves, outputs_, columns)


def _scalar(problem: Problem, batch: Batch, part: Part, z: Tensor | LinearHead) -> Tensor:
    """Return the scalar to differentiate twice: the loss, or ⟨∂loss/∂z held fixed, z⟩."""
    loss = problem.loss
    if isinstance(z, LinearHead):
        return loss.head_sum(z, batch.targets, batch.weights, part=part)
    if part == "hessian":
        return loss.sum(z, batch.targets, batch.weights)
    return (loss.gradient(z.detach(), batch.targets, batch.weights) * z).sum()


def _output_tensors(z: Tensor | LinearHead) -> Sequence[Tensor | None]:
    """Return the output tensor, or the tensors that the outputs are computed from."""
    return (z,) if isinstance(z, Tensor) else tuple(z)


def required(x: Tensor | LinearHead | None) -> Tensor:
    """Narrow `Tensor | LinearHead | None` to `Tensor`."""
    assert isinstance(x, torch.Tensor)
    return x


def _union(first: Names, second: Names) -> Names:
    return tuple(dict.fromkeys(first + second))
