"""Products of the Hessian and its parts by plain autograd, without our kernels: to compare ours with.

What a product may be off by: a bound, or ten times what plain autograd is off by where that is more.

The bound of float32 is no tighter because of models that are sure of their answers: few digits are left there
of p (u − ⟨p, u⟩), and of ways to compute it some keep more than others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from curvescope.algorithms.sums import add_up
from curvescope.core.blocks import ParamSpace
from curvescope.core.parts import MATRICES, MatrixName
from curvescope.core.seeds import generator
from curvescope.data.batches import Batch
from curvescope.kernels.substitute import PlainAttention
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import OPERATORS
from curvescope.problem import Leaves, Problem, differentiating

Found = Sequence[Tensor | None]
SEED = 2026


def part_of(op: CurvatureOperator) -> MatrixName | None:
    """Which of the Hessian and its parts an operator is, its own or a class made from it; None for others."""
    return next((name for name in MATRICES if isinstance(op, OPERATORS[name])), None)


def plain_product(part: MatrixName, problem: Problem, batch: Batch, space: ParamSpace, V: Tensor) -> Tensor:
    """The sum over a placed batch's terms applied to columns (n, k): the functional Hessian is H − H_o."""
    if part == "hessian":
        return double_backward(problem, batch, space, V)
    outer = gauss_newton(problem, batch, space, V)
    return outer if part == "ggn" else double_backward(problem, batch, space, V) - outer


def plain_products(part: MatrixName, problem: Problem, space: ParamSpace, V: Tensor) -> list[Tensor]:
    """Products with columns (n, k) over all data in the problem's own precision: what rounding makes of them.

    One at the parameters, and one at parameters that are a rounding away, since by chance a single product
    may be right where most are not.
    """
    found = []
    for at in (problem, a_rounding_away(problem)):
        total = torch.zeros(V.shape, dtype=torch.float64, device=V.device)
        for batch in at.local_batches("verification"):
            total += plain_product(part, at, batch, space, V)
        found.append(total / at.num_terms)
    return found


def a_rounding_away(problem: Problem) -> Problem:
    """The problem at parameters that have another last digit."""
    return problem.at({name: nudged(p.detach()) for name, p in problem.named_parameters()})


def nudged(x: Tensor) -> Tensor:
    """Each entry moved by a rounding, up or down, or left alone."""
    signs = torch.randint(-1, 2, x.shape, generator=generator(SEED)).to(x)
    return x * (1 + torch.finfo(x.dtype).eps * signs)


def double_backward(problem: Problem, batch: Batch, space: ParamSpace, V: Tensor) -> Tensor:
    """The Hessian of the sum over a placed batch's terms, applied to columns (n, k): plain autograd."""

    def loss(leaves: Leaves) -> Tensor:
        with PlainAttention():
            return problem.loss.sum(problem.outputs(batch, leaves), batch.targets, batch.weights)

    with differentiating():
        leaves, value = problem.differentiable(space.parameter_names, loss, lambda value: [value])
        inputs = list(leaves.values())
        first: Found = [None] * len(inputs)
        if value.requires_grad:
            first = torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True)
        found = [_slopes(first, inputs, space.scatter(v)) for v in V.unbind(1)]
    return _columns(found, leaves, space)


def gauss_newton(problem: Problem, batch: Batch, space: ParamSpace, V: Tensor) -> Tensor:
    """Jᵀ M J applied to columns (n, k): J v is the derivative of ⟨Jᵀu, v⟩ in u."""

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
        found: list[Found] = []
        for v in V.unbind(1):
            (moved,) = _slopes(back, [u], space.scatter(v))
            bent = None if moved is None else loss_curvature(problem, batch, z, moved)
            ends: Found = [None] * len(inputs)
            if bent is not None:
                ends = torch.autograd.grad(z, inputs, bent, retain_graph=True, allow_unused=True)
            found.append(ends)
    return _columns(found, leaves, space)


def loss_curvature(problem: Problem, batch: Batch, z: Tensor, direction: Tensor) -> Tensor:
    """∂²(sum)/∂z² applied to a direction, by autograd and not as the loss itself writes it."""
    with differentiating():
        z = z.detach().requires_grad_()
        value = problem.loss.sum(z, batch.targets, batch.weights)
        (first,) = torch.autograd.grad(value, z, create_graph=True)
        (found,) = _slopes([first], [z], {"z": direction})
    return torch.zeros_like(z) if found is None else found


def _slopes(first: Found, inputs: Sequence[Tensor], tangents: dict[str, Tensor]) -> Found:
    """The derivative of ⟨first, tangents⟩."""
    both = zip(first, tangents.values(), strict=True)
    forms = [(g * t).sum() for g, t in both if g is not None and g.requires_grad]
    if not forms:
        return [None] * len(inputs)
    return torch.autograd.grad(sum(forms[1:], forms[0]), inputs, retain_graph=True, allow_unused=True)


def _columns(found: Sequence[Found], leaves: Leaves, space: ParamSpace) -> Tensor:
    trees = [dict(zip(leaves, ends, strict=True)) for ends in found]
    columns = [space.gather({k: t for k, t in tree.items() if t is not None}) for tree in trees]
    return torch.stack(columns, dim=1)


TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-3}  # far below a mistake, above rounding
TIMES, FAR = 10, 0.3  # times what plain autograd is off by; beyond FAR next to nothing is verified


def allowed_by(limit: float, plain: float) -> float:
    """The tolerance where rounding, of plain autograd or of the operator itself, is `plain`.

    Where that is more than a tenth of all, twice as much is not held against a product; and where next to
    nothing is left, ten times as much is not: what is zero but for rounding has any size.
    """
    return max(limit, min(TIMES * plain, FAR), (TIMES if plain > FAR else 3) * plain)


def on(op: CurvatureOperator, problem: Problem) -> CurvatureOperator:
    """The operator that is asked about, on another problem."""
    found = copy.copy(op)
    found.problem, found.engine = problem, op.engine.of(problem)
    return found


def own_rounding(op: CurvatureOperator, V: Tensor, product: Tensor) -> Tensor:
    """How far a product (n, k) is from that at parameters a rounding away: the operator's own noise."""
    return (on(op, a_rounding_away(op.problem)) @ V).double() - product.double()


def bare(op: CurvatureOperator) -> CurvatureOperator:
    """The operator without damping and weight decay, beside which its own numbers may be rounding."""
    found = copy.copy(op)
    found.shift = None
    return found


def spaced(problem: Problem, like: ParamSpace) -> ParamSpace:
    """The same blocks in the same order, in another type."""
    return replace(problem.space(*(block.name for block in like)), whole=like.whole)


def norm(x: Tensor) -> float:
    """‖x‖ in float64, or that of the pieces that ranks have of it."""
    return float(add_up(torch.linalg.vector_norm(x, dtype=torch.float64).square()).sqrt())
