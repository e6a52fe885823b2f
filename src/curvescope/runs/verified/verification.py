"""What a run checks of itself: the products that its numbers are made of, in ways that share no code with it.

For a symmetric operator C over n parameters, at the first product of its kind, with random signs u, v:

    symmetry            |uᵀCv − vᵀCu| / ‖Cv‖, for one direction about ‖C − Cᵀ‖_F / ‖C‖_F
    finite difference   of the Hessian: ‖D − Hv‖ / ‖Hv‖ with D = (∇L(θ + hv) − ∇L(θ − hv)) / 2h
    columns             of the Hessian of a small model, on a few positions: four columns against a double
                        backward pass of the loss without our kernels

Gradients are those of plain autograd in float64, of the model itself or of a copy that is thrown away. There
h = 1e-6 times the typical size of a parameter is far above rounding and far below the distance to a kink of
a ReLU; where one lies between, a tenth of it is tried. Where a product is further off than it may be, ten
times what plain autograd is off by in the same precision is allowed. A model too large for a copy is
differentiated in its own float32, with a step that keeps rounding to a thousandth, and a second, twice as
long, says how far that goes. The finite difference counts block by block: a small block is not lost beside a
large one.

Of a model that is spread over ranks all of them check it together, each its pieces, and have the same errors:
what is said above, with no copy, so that in float32 there are no columns.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from curvescope.algorithms.sums import add_up, norms
from curvescope.algorithms.vectors import columns_of
from curvescope.core.blocks import ParamSpace
from curvescope.core.numbers import plural
from curvescope.core.ranks.spread import over
from curvescope.core.seeds import generator, probes
from curvescope.data.batches import Batch
from curvescope.engines.ask import few_positions
from curvescope.engines.memory import ran_out
from curvescope.kernels.substitute import PlainAttention
from curvescope.operators.base import CurvatureOperator
from curvescope.operators.curvature import Hessian
from curvescope.problem import Problem, differentiating
from curvescope.runs.verified.checks import Check, Verification

STEP = 1e-6  # in float64, in units of the root mean square of the parameters
NOISE, ROUNDINGS = (
    1e-3,
    32,
)  # in float32: what rounding may be of a difference, and of a gradient in roundings
TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-3}  # far below a mistake, above rounding
SMALL_SHARE = 0.01  # of ‖Hv‖, spread evenly over the entries: what a block is measured by at least
COPIED = 2**27  # parameters of a model of which a copy in float64 is made
SMALL, COLUMNS = 2**20, 4  # parameters of a small model, and columns that are looked at
SEED = 2026
FAR = 0.3  # a tolerance beyond which nothing is verified


def verify(op: CurvatureOperator) -> Verification | None:
    """Check products of an operator; None of one that is not square and symmetric.

    Two products and two or four gradients; of a small model, columns on a few positions too.
    """
    if not op.symmetric or op.dtype not in TOLERANCE or op.shape[0] == 0:
        return None
    pieces = columns_of(op)
    with over(op.problem.model.spread):
        V = probes(op.shape[0], 2, seed=SEED, dtype=op.dtype, device=op.device, pieces=pieces)
        CV = op @ V
        checks = [_symmetry(op, V, CV)]
        if type(op) is Hessian:
            checks += _of_hessian(op, V[:, 0], CV[:, 0])
    names = type(op).__name__, op.problem.model.name, str(op.dtype).removeprefix("torch.")
    return Verification(*names, tuple(checks), _left_out(op))


def _left_out(op: CurvatureOperator) -> tuple[str, ...]:
    """Columns, where there is no copy in float64 to compare them with: ranks would hold its pieces."""
    small = op.problem.model.num_parameters <= SMALL and op.problem.loss.splits
    apart = op.pieces is not None and op.dtype != torch.float64
    return ("columns",) if type(op) is Hessian and small and apart else ()


def _of_hessian(op: Hessian, v: Tensor, product: Tensor) -> list[Check]:
    """The finite difference, in float64 where that fits into memory, and the columns of a small model."""
    exact = _exact(op.problem)
    if exact is not None:
        try:
            small = op.problem.model.num_parameters <= SMALL
            return [_difference(op, exact, v, product), *(_columns(op, exact) if small else [])]
        except (RuntimeError, MemoryError) as error:
            if op.pieces is not None or not ran_out(error):
                raise
    return [_difference(op, None, v, product)]


def _symmetry(op: CurvatureOperator, V: Tensor, CV: Tensor) -> Check:
    (_, one), (other, _) = add_up(V.double().T @ CV.double()).tolist()
    size = float(norms(CV.double(), dim=0).mean())
    error = abs(one - other) / size if size else abs(one - other)
    return Check("symmetry", error, TOLERANCE[op.dtype], "|uᵀCv − vᵀCu| / ‖Cv‖ for random signs u, v")


def _exact(problem: Problem) -> Problem | None:
    """The problem in float64, all of whose parameters may vary; None where a copy is too large or refused."""
    model, point = problem.model, problem.point
    if problem.dtype != torch.float64:
        if problem.device.type == "mps" or model.num_parameters > COPIED or model.spread is not None:
            return None
        try:
            model = replace(model, module=copy.deepcopy(model.module).double())
        except Exception:  # whatever a module does that is not made to be copied
            return None
        point = {name: p.double() for name, p in point.items()}
    return Problem(model, list(problem.batches), problem.loss, params="*").at(point)


def _space(problem: Problem, like: ParamSpace) -> ParamSpace:
    return problem.space(*(block.name for block in like))


def _difference(op: CurvatureOperator, exact: Problem | None, v: Tensor, product: Tensor) -> Check:
    """The product against a difference of gradients, by the worst block."""
    problem = op.problem if exact is None else exact
    space = _space(problem, op.space)
    v, product = v.to(problem.dtype), product.double()
    if op.shift is not None:
        product = product - (op.shift.diagonal(op.space) * v).double()
    if exact is None:
        step = ROUNDINGS * torch.finfo(v.dtype).eps * _norm(problem.gradient(*_names(space))) / NOISE
        step /= _norm(product) or 1.0
        found, twice = (_slope(problem, space, v, h) for h in (step, 2 * step))
        allowed = max(4 * _worst(twice, found, op), 4 * TOLERANCE[op.dtype])
        words = f"gradients in {v.dtype} at ±{step:.1e} and twice that, along random signs"
        return Check("finite difference", _worst(product, found, op), min(allowed, FAR), words)
    step = STEP * (_size(problem, op) or 1.0)
    error, allowed = torch.inf, TOLERANCE[op.dtype]
    for h in (step, step / 10):
        found = _slope(problem, space, v, h)
        error = min(error, _worst(product, found, op))
        if error <= allowed:
            break
    else:
        allowed = min(max(allowed, 10 * _rounding(op, v, found)), FAR)
    words = f"gradients in float64 at ±{step:.1e} along random signs; the worst block"
    return Check("finite difference", error, allowed, words)


def _names(space: ParamSpace) -> list[str]:
    return [block.name for block in space]


def _slope(problem: Problem, space: ParamSpace, v: Tensor, h: float) -> Tensor:
    """(∇L(θ + hv) − ∇L(θ − hv)) / 2h in float64."""
    tree, own = space.scatter(v), problem.parameters
    ends = [
        problem.at({name: (own[name] + sign * h * t).detach() for name, t in tree.items()})
        for sign in (1, -1)
    ]
    up, down = (end.gradient(*_names(space)).double() for end in ends)
    return (up - down) / (2 * h)


def _worst(found: Tensor, right: Tensor, op: CurvatureOperator) -> float:
    """The largest ‖found − right‖ / ‖right‖ of a block, a block counting at least as its share of all."""
    even = SMALL_SHARE * _norm(right) / op.shape[0] ** 0.5
    errors, slices = [], op.space.slices
    for block in op.space:
        rows = slices[block.name]
        size = max(_norm(right[rows]), even * op.problem.model.size_of(block) ** 0.5)
        gap = _norm((found - right)[rows])
        errors.append(gap / size if size else gap)
    return max(errors)


def _rounding(op: CurvatureOperator, v: Tensor, right: Tensor) -> float:
    """How far plain autograd in the operator's own precision is from what is right."""
    return _worst(_plain(op.problem, op.space, v[:, None].to(op.dtype))[:, 0], right, op)


def _plain(problem: Problem, space: ParamSpace, V: Tensor) -> Tensor:
    """The Hessian applied to columns (n, k) by plain autograd, in float64."""
    total = torch.zeros(V.shape, dtype=torch.float64, device=V.device)
    for batch in problem.own_batches("verification"):
        total += double_backward(problem, batch, space, V).double()
    return total / problem.num_terms


def _columns(op: CurvatureOperator, exact: Problem) -> list[Check]:
    """A few columns of the Hessian on a few positions, those of parameters of different blocks."""
    if not op.problem.loss.splits:
        return []
    few = few_positions(op.problem).batch
    part = Problem(op.problem.model, [few], op.problem.loss, params="*").at(op.problem.point)
    E = _units(op).to(op.device)
    how: dict[str, Any] = {"engine": op.engine.wanted, "checkpoint": op.engine.checkpoint}
    ours = (Hessian(part, *_names(op.space), **how) @ E.to(op.dtype)).double()
    same = Problem(exact.model, [few], op.problem.loss, params="*").at(exact.point)
    right = _plain(same, _space(same, op.space), E.double())
    size = _norm(right)
    error = _norm(ours - right) / size if size else _norm(ours - right)
    allowed = 4 * TOLERANCE[op.dtype]
    if error > allowed and size:
        plain = _plain(part, op.space, E.to(op.dtype))
        allowed = min(max(allowed, 10 * _norm(plain - right) / size), FAR)
    words = f"{plural(E.shape[1], 'column')} on a few positions against a double backward pass in float64"
    return [Check("columns", error, allowed, words)]


def _units(op: CurvatureOperator) -> Tensor:
    """Unit vectors (n, k) of one parameter in each of up to four blocks, spread over all blocks."""
    sizes = [op.problem.model.size_of(block) for block in op.space]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    some = range(COLUMNS) if len(sizes) > COLUMNS else range(len(sizes))
    chosen = [i * len(sizes) // len(some) for i in some]
    source = generator(SEED)
    rows = [starts[i] + int(torch.randint(sizes[i], (1,), generator=source)) for i in chosen]
    E = torch.zeros(op.shape[0], len(rows), dtype=torch.float64)
    E[rows, range(len(rows))] = 1
    return E if op.pieces is None else E[op.pieces[0].positions()]


def double_backward(problem: Problem, batch: Batch, space: ParamSpace, V: Tensor) -> Tensor:
    """The Hessian of the sum over a placed batch's terms, applied to columns (n, k): plain autograd."""

    def loss(leaves: dict[str, Tensor]) -> Tensor:
        with PlainAttention():
            return problem.loss.sum(problem.outputs(batch, leaves), batch.targets, batch.weights)

    with differentiating():
        leaves, value = problem.differentiable(space.parameters, loss, lambda value: [value])
        inputs = list(leaves.values())
        first = torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True)
        found = [_second(first, inputs, space.scatter(v)) for v in V.unbind(1)]
    trees = [dict(zip(leaves, second, strict=True)) for second in found]
    columns = [space.gather({k: t for k, t in tree.items() if t is not None}) for tree in trees]
    return torch.stack(columns, dim=1)


def _second(
    first: Sequence[Tensor | None], inputs: Sequence[Tensor], tangents: dict[str, Tensor]
) -> Sequence[Tensor | None]:
    """The derivative of ⟨∇L, v⟩."""
    both = [
        (g, t) for g, t in zip(first, tangents.values(), strict=True) if g is not None and g.requires_grad
    ]
    if not both:
        return [None] * len(inputs)
    forms = sum((g * t).sum() for g, t in both)
    assert isinstance(forms, Tensor)
    return torch.autograd.grad(forms, inputs, retain_graph=True, allow_unused=True)


def _norm(x: Tensor) -> float:
    """‖x‖, or that of the pieces that ranks have of it."""
    return float(add_up(torch.linalg.vector_norm(x, dtype=torch.float64).square()).sqrt())


def _size(problem: Problem, op: CurvatureOperator) -> float:
    """The root mean square of the parameters of an operator."""
    space = _space(problem, op.space)
    theta = space.gather({name: problem.parameters[name].detach() for name in space.parameters})
    return _norm(theta) / max(op.shape[0], 1) ** 0.5
