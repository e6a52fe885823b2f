"""Comparison of autograd with finite differences for modules with a hand-written backward.

PyTorch does not check the backward of a custom `autograd.Function`. If it is not the derivative of the
forward (straight-through, gradient reversal), J and H are wrong. If it uses a value without a graph, only H
is wrong. Both are checked once per model, on a few positions, if its graph has such a function.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.core.errors import CurvescopeError
from curvescope.core.finite_differences import STEPS, Tensors, difference_error
from curvescope.core.seeds import generator
from curvescope.core.tensors import constant_rows, custom_functions
from curvescope.data.batches import Batch
from curvescope.engines import batch_products
from curvescope.engines.memory import free_bytes
from curvescope.engines.module_runner import Runner
from curvescope.problem import TRUE_BACKWARD, Leaves, Problem, differentiating, double_copy

LOG = logging.getLogger("curvescope")


@dataclass(frozen=True)
class Derivatives:
    """Errors to raise for products with first and with second derivatives; None if they are right."""

    first: str | None = None
    second: str | None = None

    def refuse(self, *, second: bool = False) -> None:
        """Raise if the derivatives that a product needs are not those of the loss."""
        if self.first is not None:
            raise CurvescopeError(self.first, hint=TRUE_BACKWARD)
        if second and self.second is not None:
            raise CurvescopeError(
                self.second,
                hint="compute backward from tensors of ctx.save_for_backward, with operations that autograd "
                "can differentiate; GGN, Fishers and the Jacobian need no second derivative",
            )


def compare_derivatives(problem: Problem, sample: Batch, names: Sequence[str] | None = None) -> Derivatives:
    """Compare J v and H v with finite differences if a custom function is in the graph of the module.

    Args:
        problem: The problem whose module is differentiated.
        sample: A batch of a few positions on the model's device.
        names: Custom functions in the graph; by default, a forward pass finds them.
    """
    if problem.model.spread is not None:
        return Derivatives()
    functions = ""
    try:
        names = custom_functions(_scalar(problem, sample)[1]) if names is None else names
        functions = ", ".join(names)
        return _compared(*_widened(problem, sample), functions) if functions else Derivatives()
    except (CurvescopeError, RuntimeError) as error:  # the product itself raises the same error
        if functions:
            LOG.warning("%s was not compared with a finite difference: %s", functions, error)
        return Derivatives()


def movable(problem: Problem, batch: Batch) -> Leaves:
    """Return masks of the parameters: 1 where a finite difference may change an entry, 0 in rows of padding.

    PyTorch treats the row `padding_idx` of an embedding as a constant.
    """
    leaves, s = _scalar(problem, batch)
    names = {id(leaf): name for name, leaf in leaves.items()}
    masks = {name: torch.ones(leaf.shape).to(leaf.detach()) for name, leaf in leaves.items()}
    for leaf, row in constant_rows(s):
        if id(leaf) in names:
            masks[names[id(leaf)]][row] = 0
    return masks


def _scalar(problem: Problem, batch: Batch) -> tuple[Leaves, Tensor]:
    """The loss summed over a batch, as a function of leaves for all parameters."""
    runner = Runner(problem, checkpoint=problem.model.releases)

    def scalar(leaves: Leaves) -> Tensor:
        z = batch_products.required(runner.outputs(batch, leaves, second_order=True, lazy=False))
        return problem.loss.sum(z, batch.targets, batch.weights)

    with differentiating():
        return problem.differentiable(tuple(dict(problem.model.named_parameters())), scalar, lambda s: [s])


def _widened(problem: Problem, sample: Batch) -> tuple[Problem, Batch]:
    """Return the problem on a few positions in float64 if possible, else unchanged."""
    model = problem.model
    size = 8 * sum(p.numel() for p in model.parameters())
    if problem.dtype == torch.float64 or model.widening is not None or 4 * size > free_bytes(problem.device):
        return problem, sample
    try:
        double, batch = double_copy(problem, sample)
        _scalar(double, batch)
    except Exception as error:  # a module may raise anything in another dtype
        LOG.debug("%s does not run in float64: %s", model.name, error)
        return problem, sample
    return double, batch


def _compared(problem: Problem, batch: Batch, functions: str) -> Derivatives:
    names, runner = (
        tuple(dict(problem.model.named_parameters())),
        Runner(problem, checkpoint=problem.model.releases),
    )
    source, parameters = generator(0), {name: p.detach() for name, p in problem.named_parameters()}
    # the step of each parameter is proportional to its size, or one for a parameter that is zero
    moves = movable(problem, batch)
    v = [
        torch.randn(p.shape, generator=source).to(p.device, problem.dtype)
        * (float(p.float().square().mean().sqrt()) or 1.0)
        * moves[name]
        for name, p in parameters.items()
    ]

    def at(step: float) -> Problem:
        shifted = {n: p.to(problem.dtype) + step * d for (n, p), d in zip(parameters.items(), v, strict=True)}
        return problem.at(shifted)

    def outputs(step: float) -> Tensors:
        with torch.no_grad():
            z = Runner(at(step)).outputs(batch, {}, second_order=False, lazy=False)
            return [batch_products.required(z)]

    with differentiating():
        slopes = lambda step: _gradient(at(step), batch)  # noqa: E731
        slopes(STEPS[torch.float64][0])  # raises if the module also holds a parameter elsewhere
        directions = [d[None] for d in v]
        graph = batch_products.linearized(problem, runner, batch, (), names, lazy=False)
        first = difference_error([Jv[0] for Jv in graph.push(directions, 1)], outputs, problem.dtype)
        if first is not None:
            return Derivatives(_words(functions, "J v", first, "the derivative of its forward", problem))
        work = batch_products.second_derivative(problem, runner, batch, "hessian", names, names)
        products = batch_products.results(work, directions, names)
        product = [torch.zeros_like(d) if x is None else x[0] for x, d in zip(products, v, strict=True)]
        second = difference_error(product, slopes, problem.dtype)
    if second is None:
        return Derivatives()
    return Derivatives(second=_words(functions, "H v", second, "differentiable itself", problem))


def _words(functions: str, product: str, error: float, what: str, problem: Problem) -> str:
    return (
        f"{problem.model.name} uses {functions}: expected a backward that is {what}, got {product} that "
        f"differs from a finite difference by {error:.1%}"
    )


def _gradient(problem: Problem, batch: Batch) -> Tensors:
    leaves, s = _scalar(problem, batch)
    into = list(leaves.values())
    return torch.autograd.grad(s, into, allow_unused=True, materialize_grads=True)
