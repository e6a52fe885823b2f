"""Reference products of the Hessian and its parts by plain autograd, without our kernels.

The error of a product may reach a fixed bound, or ten times the error of plain autograd if that is more. The
bound in float32 allows for very confident models: there p (u − ⟨p, u⟩) loses most of its digits, and some
ways to compute it lose more than others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import sum_over_ranks
from curvescope.core.blocks import ParamSpace
from curvescope.core.hessian_terms import MATRICES, MatrixName
from curvescope.core.seeds import generator
from curvescope.data.batches import Batch
from curvescope.kernels.function_mode import PlainAttention
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import OPERATORS
from curvescope.problem import Leaves, Problem, differentiating

Found = Sequence[Tensor | None]
SEED = 2026


def matrix_name(op: CurvatureOperator) -> MatrixName | None:
    """Return the name of the Hessian or its part that an operator is; None for other operators."""
    return next((name for name in MATRICES if isinstance(op, OPERATORS[name])), None)


def plain_product(part: MatrixName, problem: Problem, batch: Batch, space: ParamSpace, V: Tensor) -> Tensor:
    """Matrix of the sum over a placed batch's terms, applied to columns (n, k); H_f is H − H_o."""
    if part == "hessian":
        return double_backward(problem, batch, space, V)
    outer = gauss_newton(problem, batch, space, V)
    return outer if part == "ggn" else double_backward(problem, batch, space, V) - outer


def plain_products(part: MatrixName, problem: Problem, space: ParamSpace, V: Tensor) -> list[Tensor]:
    """Return products with columns (n, k) over all data in the problem's own precision, to measure rounding.

    One is at the parameters and one at parameters a rounding away, since a single product may be accurate by
    chance.
    """
    products = []
    for at in (problem, perturbed_by_rounding(problem)):
        total = torch.zeros(V.shape, dtype=torch.float64, device=V.device)
        for batch in at.local_batches("verification"):
            total += plain_product(part, at, batch, space, V)
        products.append(total / at.num_terms)
    return products


def perturbed_by_rounding(problem: Problem) -> Problem:
    """Return the problem with the last digit of its parameters changed."""
    return problem.at({name: perturb_last_digit(p.detach()) for name, p in problem.named_parameters()})


def perturb_last_digit(x: Tensor) -> Tensor:
    """Move each entry to the next number up or down, or leave it unchanged, at random."""
    signs = torch.randint(-1, 2, x.shape, generator=generator(SEED)).to(x)
    return x * (1 + torch.finfo(x.dtype).eps * signs)


def double_backward(problem: Problem, batch: Batch, space: ParamSpace, V: Tensor) -> Tensor:
    """Apply the Hessian of the sum over a placed batch's terms to columns (n, k), by plain autograd."""

    def loss(leaves: Leaves) -> Tensor:
        with PlainAttention():
            return problem.loss.sum(problem.outputs(batch, leaves), batch.targets, batch.weights)

    with differentiating():
        leaves, value = problem.differentiable(space.parameter_names, loss, lambda value: [value])
        inputs = list(leaves.values())
        first: Found = [None] * len(inputs)
        if value.requires_grad:
            first = torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True)
        derivatives = [_directional_gradient(first, inputs, space.scatter(v)) for v in V.unbind(1)]
    return _columns(derivatives, leaves, space)


def gauss_newton(problem: Problem, batch: Batch, space: ParamSpace, V: Tensor) -> Tensor:
    """Apply Jᵀ M J to columns (n, k); J v is the derivative of ⟨Jᵀu, v⟩ in u."""

    def outputs(leaves: Leaves) -> Tensor:
        with PlainAttention():
            return problem.outputs(batch, leaves)

    with differentiating():
        leaves, z = problem.differentiable(space.parameter_names, outputs, lambda z: [z])
        inputs = list(leaves.values())
        if not z.requires_grad:
            return torch.zeros_like(V)
        u = torch.zeros_like(z).requires_grad_()
        back = torch.autograd.grad(z, inputs, u, create_graph=True, allow_unused=True)
        columns: list[Found] = []
        for v in V.unbind(1):
            (Jv,) = _directional_gradient(back, [u], space.scatter(v))
            bent = None if Jv is None else loss_curvature(problem, batch, z, Jv)
            ends: Found = [None] * len(inputs)
            if bent is not None:
                ends = torch.autograd.grad(z, inputs, bent, retain_graph=True, allow_unused=True)
            columns.append(ends)
    return _columns(columns, leaves, space)


def loss_curvature(problem: Problem, batch: Batch, z: Tensor, direction: Tensor) -> Tensor:
    """Apply ∂²(sum)/∂z² to a direction by autograd, without the loss's own formulas."""
    with differentiating():
        z = z.detach().requires_grad_()
        value = problem.loss.sum(z, batch.targets, batch.weights)
        (first,) = torch.autograd.grad(value, z, create_graph=True)
        (result,) = _directional_gradient([first], [z], {"z": direction})
    return torch.zeros_like(z) if result is None else result


def _directional_gradient(first: Found, inputs: Sequence[Tensor], tangents: dict[str, Tensor]) -> Found:
    """Derivative of ⟨first, tangents⟩."""
    pairs = zip(first, tangents.values(), strict=True)
    forms = [(g * t).sum() for g, t in pairs if g is not None and g.requires_grad]
    if not forms:
        return [None] * len(inputs)
    return torch.autograd.grad(sum(forms[1:], forms[0]), inputs, retain_graph=True, allow_unused=True)


def _columns(derivatives: Sequence[Found], leaves: Leaves, space: ParamSpace) -> Tensor:
    trees = [dict(zip(leaves, ends, strict=True)) for ends in derivatives]
    columns = [space.gather({k: t for k, t in tree.items() if t is not None}) for tree in trees]
    return torch.stack(columns, dim=1)


# Above rounding, far below a wrong product's error.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-3}
TIMES, FAR = 10, 0.3  # multiple of plain autograd's error; above FAR the check shows almost nothing


def tolerance_with_rounding(limit: float, plain: float) -> float:
    """Tolerance if the rounding error, of plain autograd or of the operator itself, is `plain`.

    If the rounding error exceeds a tenth, a product may be off by twice as much. If almost no digits are
    left, it may be off by ten times as much, because a value that is zero except for rounding can have any
    size.
    """
    return max(limit, min(TIMES * plain, FAR), (TIMES if plain > FAR else 3) * plain)


def on_problem(op: CurvatureOperator, problem: Problem) -> CurvatureOperator:
    """Return the same operator on another problem."""
    copied = copy.copy(op)
    copied.problem, copied.engine = problem, op.engine.of(problem)
    return copied


def rounding_of_operator(op: CurvatureOperator, V: Tensor, product: Tensor) -> Tensor:
    """Difference of a product (n, k) from one at parameters a rounding away: the operator's own noise."""
    return (on_problem(op, perturbed_by_rounding(op.problem)) @ V).double() - product.double()


def without_shift(op: CurvatureOperator) -> CurvatureOperator:
    """Return the operator without damping and weight decay, which may dominate its own numbers."""
    copied = copy.copy(op)
    copied.shift = None
    return copied


def space_like(problem: Problem, like: ParamSpace) -> ParamSpace:
    """Return a parameter space with the same blocks in the same order, in the problem's dtype."""
    return replace(problem.space(*(block.name for block in like)), whole=like.whole)


def global_norm(x: Tensor) -> float:
    """‖x‖ in float64; for sharded vectors the norm of the full vector."""
    return float(sum_over_ranks(torch.linalg.vector_norm(x, dtype=torch.float64).square()).sqrt())
