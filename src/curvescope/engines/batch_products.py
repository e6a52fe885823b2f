"""What a product computes of one batch: built once, then called with tangents.

A work holds the graph that does not depend on the directions: that of the gradient for a second derivative,
that of Jᵀu for products with J. Nothing here knows spaces or the division by the number of terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvescope.core.parts import MatrixName
from curvescope.core.tensors import leaves_of
from curvescope.data.batches import Batch
from curvescope.engines.run import PlainRunner, Runner
from curvescope.engines.vjp import Linearized, Receive, gradient_edges, linearize, pull_each
from curvescope.kernels.head import LinearHead
from curvescope.kernels.linear import twin
from curvescope.losses.base import Part
from curvescope.models.capture.points import find_point
from curvescope.models.capture.spots import Added, Spot
from curvescope.models.model import Model
from curvescope.models.running.exchange import Change
from curvescope.models.sources import repeated_layers
from curvescope.problem import Leaves, Problem

Work = Callable[[Sequence[Tensor], int, Receive], None]
"""Takes tangents (k, *shape) in the order of the columns, how many to treat at once, and who receives the
results, one after the other by their numbers among the rows; what comes twice is to be added."""
Names = tuple[str, ...]
TWINS_ON = ("cuda",)  # where memory is scarce; a CPU keeps the order of its sums


def results(work: Work, tangents: Sequence[Tensor], group: int, num_rows: int) -> list[Tensor | None]:
    """All results of a work together."""
    found: list[Tensor | None] = [None] * num_rows

    def receive(number: int, x: Tensor) -> None:
        before = found[number]
        found[number] = x if before is None else before + x

    work(tangents, group, receive)
    return found


def second_derivative(
    problem: Problem, runner: Runner, batch: Batch, part: Part, rows: Names, columns: Names
) -> Work:
    """∂²s/∂θ_rows ∂θ_cols, s the scalar of `part`."""
    graph = gradient_graph(problem, runner, batch, part, _union(rows, columns), columns)
    numbers = [*range(len(rows)), *(i for i, name in enumerate(rows) if name in graph.twins)]
    into = [graph.leaves[name] for name in rows] + [graph.twins[n] for n in rows if n in graph.twins]

    def work(v: Sequence[Tensor], group: int, receive: Receive) -> None:
        pull_each(graph.first, v, into, group, lambda number, x: receive(numbers[number], x))

    return work


class GradientGraph(NamedTuple):
    """Where ∂s/∂θ_cols lie in a graph, the leaves that they depend on, and those leaves' twins."""

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
    look: Callable[[Tensor], object] = lambda s: None,
) -> GradientGraph:
    """The graph of ∂s/∂θ_cols, to be differentiated in the named parameters; `look` is called with s."""
    second: Leaves = {}

    def scalar(leaves: Leaves) -> Tensor:
        second.clear()
        if twins:
            second.update({name: twin(leaf) for name, leaf in leaves.items() if _has_twin(leaf)})
        return _scalar(problem, batch, part, runner.outputs(batch, leaves, second_order=True, lazy=True))

    leaves, s = problem.differentiable(names, scalar, lambda s: [s])
    look(s)
    return GradientGraph(gradient_edges(s, [leaves[name] for name in columns]), leaves, second)


def _has_twin(leaf: Tensor) -> bool:
    """On a GPU, where our linear maps and layers that are computed again ask for it."""
    return leaf.device.type in TWINS_ON and not isinstance(leaf, nn.Parameter)


def ggn(problem: Problem, runner: Runner, batch: Batch, rows: Names, columns: Names) -> Work:
    """Jᵀ (∂²loss/∂z²) J."""
    graph = linearized(problem, runner, batch, rows, columns, lazy=True)
    return _sandwiched(problem, batch, graph, [graph.leaves[name] for name in rows])


def in_activations(problem: Problem, runner: Runner, batch: Batch, part: MatrixName, at: str) -> Work:
    """The same in place of parameters for the activations x at a point: ∂²s/∂x², or its GGN."""
    added = Added(find_point(problem.model, at), batch.num_sequences)
    outputs = partial(_moved_outputs, problem, runner, batch, added, second_order=part != "ggn")
    if part == "ggn":
        _, z = problem.differentiable((), outputs, _ends)
        graph = linearize({at: added.delta}, tuple(_ends(z)), (at,))
        return _sandwiched(problem, batch, graph, [added.delta])

    def scalar(leaves: Leaves) -> Tensor:
        return _scalar(problem, batch, part, outputs(leaves))

    _, s = problem.differentiable((), scalar, lambda s: [s])
    first, into = gradient_edges(s, [added.delta]), [added.delta]
    return lambda v, group, receive: pull_each(first, v, into, group, receive)


def activation_gradient(problem: Problem, runner: Runner, batch: Batch, at: str) -> Tensor:
    """∂s/∂x for the activations x at a point."""
    added = Added(find_point(problem.model, at), batch.num_sequences)

    def scalar(leaves: Leaves) -> Tensor:
        z = _moved_outputs(problem, runner, batch, added, leaves, second_order=False)
        return _scalar(problem, batch, "hessian", z)

    _, s = problem.differentiable((), scalar, lambda s: [s])
    (found,) = torch.autograd.grad(s, [added.delta], allow_unused=True) if s.requires_grad else (None,)
    return torch.zeros_like(added.delta) if found is None else found


def _moved_outputs(
    problem: Problem, runner: Runner, batch: Batch, added: Added, _: Leaves, *, second_order: bool
) -> Tensor | LinearHead:
    """Outputs where x + δ goes on from a point; as the module is, where our kernels do not pass the point."""
    kept = _kept_layer(problem.model, added.point.write) if runner.checkpoint else []
    z = runner.outputs(
        batch, {}, second_order=second_order, lazy=True, more=lambda: [*kept, *added.changes()]
    )
    if added.count != 1 or (runner.checkpoint and not _begins(added.delta, z)):
        z = PlainRunner(problem).outputs(batch, {}, second_order=True, lazy=False, more=added.changes)
    added.check()
    return z


def _kept_layer(model: Model, spot: Spot) -> list[Change]:
    """The layer around a spot is none of those that are computed again: δ is no input of it."""
    for layer in repeated_layers(model.module):
        inside = layer.modules() if spot.method else (part for part in layer.modules() if part is not layer)
        if any(part is spot.owner for part in inside):
            return [Change(vars(layer), "forward", model.whole_forward(layer))]
    return []


def _begins(leaf: Tensor, z: Tensor | LinearHead) -> bool:
    """Whether the graph of outputs begins with a leaf."""
    return any(found is leaf for end in _ends(z) if end is not None for found in leaves_of(end))


def _sandwiched(problem: Problem, batch: Batch, graph: Linearized, into: list[Tensor]) -> Work:
    """Jᵀ (∂²loss/∂z²) J for the outputs of a graph."""
    loss = problem.loss
    fixed = [None if x is None else x.detach() for x in graph.outputs]
    curvature: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
    if len(fixed) == 1:
        z, terms = required(fixed[0]), (batch.targets, batch.weights)
        curvature = lambda moved: [loss.hessian_product(z, *terms, moved[0])]  # noqa: E731
    else:
        head = LinearHead(required(fixed[0]), required(fixed[1]), fixed[2])
        curvature = loss.head_curvature(head, batch.targets, batch.weights)

    def work(v: Sequence[Tensor], group: int, receive: Receive) -> None:
        pull_each(graph.outputs, curvature(graph.push(v, group)), into, group, receive)

    return work


def linearized(
    problem: Problem, runner: Runner, batch: Batch, rows: Names, columns: Names, *, lazy: bool
) -> Linearized:
    """The outputs as a function of leaves, with what J v and Jᵀu need."""

    def outputs(leaves: Leaves) -> tuple[Tensor | None, ...]:
        return tuple(_ends(runner.outputs(batch, leaves, second_order=False, lazy=lazy)))

    leaves, found = problem.differentiable(_union(rows, columns), outputs, lambda found: found)
    return linearize(leaves, found, columns)


def _scalar(problem: Problem, batch: Batch, part: Part, z: Tensor | LinearHead) -> Tensor:
    """The loss, or ⟨∂loss/∂z held fixed, z⟩: a number whose second derivative is asked for."""
    loss = problem.loss
    if isinstance(z, LinearHead):
        return loss.head_sum(z, batch.targets, batch.weights, part=part)
    if part == "hessian":
        return loss.sum(z, batch.targets, batch.weights)
    return (loss.gradient(z.detach(), batch.targets, batch.weights) * z).sum()


def _ends(z: Tensor | LinearHead) -> Sequence[Tensor | None]:
    """The tensors that outputs are, or are made from."""
    return (z,) if isinstance(z, Tensor) else tuple(z)


def required(x: Tensor | None) -> Tensor:
    """Narrow `Optional[Tensor]` to `Tensor`."""
    assert isinstance(x, torch.Tensor)
    return x


def _union(first: Names, second: Names) -> Names:
    return tuple(dict.fromkeys(first + second))
