"""Comparison of autograd with finite differences for modules with a hand-written backward.

PyTorch takes the backward of a custom `autograd.Function` at its word. If it is not the derivative of the
forward (straight-through, gradient reversal), J and H are wrong; if it uses a value without a graph, only H
is. Both are found once for a model, on a few positions, and only if such a function is in its graph.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.seeds import generator
from curvescope.core.tensors import constant_rows, custom_functions
from curvescope.data.batches import Batch
from curvescope.engines import batch_products
from curvescope.engines.memory import free_bytes
from curvescope.engines.run import PlainRunner
from curvescope.problem import Leaves, Problem, differentiating

LOG = logging.getLogger("curvescope")
STEPS = {torch.float64: (1e-4, 1e-5, 1e-6, 1e-7), torch.float32: (1e-2, 3e-3)}  # relative to parameters
AGREE = {torch.float64: 1e-4, torch.float32: 2e-2}  # two differences, relative; a product may be off by
FACTOR = 5  # times that
Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Derivatives:
    """Errors to raise for products with first and with second derivatives; None if they are right."""

    first: str | None = None
    second: str | None = None

    def refuse(self, *, second: bool = False) -> None:
        """Raise if the derivatives that a product needs are not those of the loss."""
        if self.first is not None:
            raise CurvescopeError(
                self.first,
                hint="write it in PyTorch operations, or give it a backward that is its derivative",
            )
        if second and self.second is not None:
            raise CurvescopeError(
                self.second,
                hint="compute backward from tensors of ctx.save_for_backward, with operations that autograd "
                "can differentiate; GGN, Fishers and the Jacobian need no second derivative",
            )


def compare_derivatives(problem: Problem, few: Batch, names: Sequence[str] | None = None) -> Derivatives:
    """Compare J v and H v with finite differences if a custom function is in the graph of the module.

    Args:
        problem: The problem whose module is differentiated.
        few: A placed batch of a few positions.
        names: Custom functions in the graph; without them a forward pass finds them.
    """
    if problem.model.spread is not None:
        return Derivatives()
    functions = ""
    try:
        names = custom_functions(_scalar(problem, few)[1]) if names is None else names
        functions = ", ".join(names)
        return _compared(*_widened(problem, few), functions) if functions else Derivatives()
    except (CurvescopeError, RuntimeError) as error:  # a product that fails for the same reason raises it
        if functions:
            LOG.warning("%s was not compared with a finite difference: %s", functions, error)
        return Derivatives()


def movable(problem: Problem, batch: Batch) -> Leaves:
    """1 for each entry of each parameter that a finite difference may move, 0 in rows of padding.

    PyTorch holds the row of an embedding's `padding_idx` constant where it is looked up.
    """
    leaves, s = _scalar(problem, batch)
    names = {id(leaf): name for name, leaf in leaves.items()}
    found = {name: torch.ones(leaf.shape).to(leaf.detach()) for name, leaf in leaves.items()}
    for leaf, row in constant_rows(s):
        if id(leaf) in names:
            found[names[id(leaf)]][row] = 0
    return found


def _scalar(problem: Problem, batch: Batch) -> tuple[Leaves, Tensor]:
    """The loss summed over a batch, as a function of leaves for all parameters."""
    runner = PlainRunner(problem, checkpoint=problem.model.releases)

    def scalar(leaves: Leaves) -> Tensor:
        z = batch_products.required(runner.outputs(batch, leaves, second_order=True, lazy=False))  # pyright: ignore[reportArgumentType]
        return problem.loss.sum(z, batch.targets, batch.weights)

    with differentiating():
        return problem.differentiable(tuple(dict(problem.model.named_parameters())), scalar, lambda s: [s])


def _widened(problem: Problem, few: Batch) -> tuple[Problem, Batch]:
    """The problem of a few positions in float64, if a copy fits and the module runs in it; else as it is."""
    model = problem.model
    size = 8 * sum(p.numel() for p in model.parameters())
    if problem.dtype == torch.float64 or model.widening is not None or 4 * size > free_bytes(problem.device):
        return problem, few
    try:
        wide = replace(model, module=copy.deepcopy(model.module).double())
        point = {name: p.double() for name, p in problem.point.items()}
        double = Problem(wide, [few], problem.loss, params="*").at(point)
        (batch,) = double.placed_batches("check of derivatives")
        _scalar(double, batch)
    except Exception as error:  # whatever a module raises that is made for one type
        LOG.debug("%s does not run in float64: %s", model.name, error)
        return problem, few
    return double, batch


def _compared(problem: Problem, batch: Batch, functions: str) -> Derivatives:
    names, runner = (
        tuple(dict(problem.model.named_parameters())),
        PlainRunner(problem, checkpoint=problem.model.releases),
    )
    source, own = generator(0), {name: p.detach() for name, p in problem.named_parameters()}
    # each parameter moves in proportion to its size, and one that is zero by a unit
    moves = movable(problem, batch)
    v = [
        torch.randn(p.shape, generator=source).to(p.device, problem.dtype)
        * (float(p.float().square().mean().sqrt()) or 1.0)
        * moves[name]
        for name, p in own.items()
    ]

    def at(step: float) -> Problem:
        moved = {n: p.to(problem.dtype) + step * d for (n, p), d in zip(own.items(), v, strict=True)}
        return problem.at(moved)

    def outputs(step: float) -> Tensors:
        with torch.no_grad():
            z = PlainRunner(at(step)).outputs(batch, {}, second_order=False, lazy=False)
            return [batch_products.required(z)]  # pyright: ignore[reportArgumentType]

    with differentiating():
        slopes = lambda step: _gradient(at(step), batch)  # noqa: E731
        slopes(STEPS[torch.float64][0])  # raises if the module holds a parameter in a second way
        directions = [d[None] for d in v]
        graph = batch_products.linearized(problem, runner, batch, (), names, lazy=False)
        first = difference_error([Jv[0] for Jv in graph.push(directions, 1)], outputs, problem.dtype)
        if first is not None:
            return Derivatives(_words(functions, "J v", first, "the derivative of its forward", problem))
        work = batch_products.second_derivative(problem, runner, batch, "hessian", names, names)
        found = batch_products.results(work, directions, 1, len(names))
        product = [torch.zeros_like(d) if x is None else x[0] for x, d in zip(found, v, strict=True)]
        second = difference_error(product, slopes, problem.dtype)
    if second is None:
        return Derivatives()
    return Derivatives(second=_words(functions, "H v", second, "differentiable itself", problem))


def _words(functions: str, product: str, error: float, wanted: str, problem: Problem) -> str:
    return (
        f"{problem.model.name} uses {functions}: expected a backward that is {wanted}, got {product} that "
        f"differs from a finite difference by {error:.1%}"
    )


def _gradient(problem: Problem, batch: Batch) -> Tensors:
    leaves, s = _scalar(problem, batch)
    into = list(leaves.values())
    return torch.autograd.grad(s, into, allow_unused=True, materialize_grads=True)


def difference_error(
    product: Tensors, values: Callable[[float], Tensors], dtype: torch.dtype
) -> float | None:
    """Relative distance of a product from a finite difference, or None if it is no larger than expected.

    A difference counts only if the one of half the step agrees with it: it is not trusted across a kink, or
    where rounding dominates.
    """
    for step in STEPS[dtype]:
        wide, narrow = _difference(values, step), _difference(values, step / 2)
        scale = max(_norm(narrow), _norm(product))
        if scale == 0:
            return None
        if _norm([a - b for a, b in zip(wide, narrow, strict=True)]) <= AGREE[dtype] * scale:
            error = _norm([a - b for a, b in zip(product, narrow, strict=True)]) / scale
            return error if error > FACTOR * AGREE[dtype] else None
    LOG.warning("a custom autograd function could not be compared with a finite difference")
    return None


def _difference(values: Callable[[float], Tensors], step: float) -> Tensors:
    pairs = zip(values(step), values(-step), strict=True)
    return [(after - before) / (2 * step) for after, before in pairs]


def _norm(tensors: Tensors) -> float:
    return sum(float(t.detach().double().square().sum()) for t in tensors) ** 0.5
