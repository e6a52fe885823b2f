"""What a run checks of itself: the products that its numbers are made of, in ways that share no code with it.

For a symmetric operator C over n parameters, at the first product of its kind, with random signs u, v:

    symmetry            |uᵀCv − vᵀCu| / ‖Cv‖, for one direction about ‖C − Cᵀ‖_F / ‖C‖_F
    finite difference   of the Hessian: ‖D − Hv‖ / ‖Hv‖ with D = (∇L(θ + hv) − ∇L(θ − hv)) / 2h
    quadratic form      of its parts: vᵀGv against (1/N) Σ ⟨Jv, M Jv⟩ with Jv = (z(θ + hv) − z(θ − hv)) / 2h
                        and M = ∂²ℓ/∂z², and vᵀFv against vᵀD − vᵀGv; relative to the larger of it and ‖Cv‖
    columns             of the three for a small model, on a few positions: block by block (`columns`)

Gradients and outputs are those of plain autograd in float64, of the model itself or of a copy that is thrown
away. There h = 1e-6 times the typical size of a parameter is far above rounding and far below the distance to
a kink of a ReLU; where one lies between, a tenth of it is tried. Where a product is further off than it may
be, ten times what plain autograd is off by in the same precision is allowed (`rounding`). A model too large
for a copy is differentiated in its own float32, with a step that keeps rounding to a thousandth, and a
second, twice as long, says how far that goes. The finite difference counts block by block: a small block is
not lost beside a large one.

Of a model that is spread over ranks all of them check it together, each its pieces, and have the same errors:
symmetry, and of the Hessian the finite difference.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from curvescope.algorithms.sums import add_up, norms
from curvescope.algorithms.vectors import columns_of
from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import ModuleError, UsageError
from curvescope.core.parts import MatrixName
from curvescope.core.ranks import dividing, from_first, place
from curvescope.core.ranks.spread import over
from curvescope.core.seeds import probes
from curvescope.engines.derivatives import movable
from curvescope.engines.memory import ran_out
from curvescope.models.running.held import RefuseHeld
from curvescope.operators import Hessian
from curvescope.operators.base import CurvatureOperator
from curvescope.problem import Problem, differentiating
from curvescope.runs.model_structure import plain, structure
from curvescope.runs.verified.checks import Check, Verification
from curvescope.runs.verified.columns import check_columns
from curvescope.runs.verified.plain import (
    FAR,
    SEED,
    TOLERANCE,
    allowed_by,
    bare,
    loss_curvature,
    norm,
    own_rounding,
    part_of,
    plain_products,
    spaced,
)

STEP = 1e-6  # in float64, in units of the root mean square of the parameters
NOISE, ROUNDINGS = 1e-3, 32  # in float32: what rounding may be of a difference, and of a gradient
SMALL_SHARE = 0.01  # of ‖Hv‖, spread evenly over the entries: what a block is measured by at least
COPIED = 2**27  # parameters of a model of which a copy in float64 is made
SMALL = 2**20  # parameters of a small model, of which columns are looked at


def verify_by_all(op: CurvatureOperator) -> Verification | None:
    """What `verify` finds, on every rank there is.

    Rank 0 checks what it makes alone, and all of them that what they make together is the same; where the
    operator is in pieces, all of them check it together.
    """
    if op.pieces is not None:
        return verify(op)
    found = from_first(lambda: verify(op))
    if found is None or dividing() is None:
        return found
    return replace(found, checks=(*found.checks, check_ranks(op)))


def verify(op: CurvatureOperator) -> Verification | None:
    """Check products of an operator; None of one that is not square and symmetric.

    Two products and two or four gradients or passes; of a small model, columns on a few positions too.
    Fishers and sources are checked for symmetry alone, and so are modules that hold a parameter in a second
    way (a closure, a list).
    """
    if not op.symmetric or op.dtype not in TOLERANCE or op.shape[0] == 0:
        return None
    with over(op.problem.model.spread):
        checks = _checks(op)
    names = type(op).__name__, op.problem.model.name, str(op.dtype).removeprefix("torch.")
    return Verification(*names, tuple(checks), _left_out(op, checks), kind=short(op))


def _checks(op: CurvatureOperator) -> list[Check]:
    pieces = columns_of(op)
    V = probes(op.shape[0], 2, seed=SEED, dtype=op.dtype, device=op.device, pieces=pieces)
    plain, exact = bare(op), _exact(op.problem)
    V[:, 0] *= _movable(op, exact)
    CV = plain @ V
    checks = [_symmetry(plain, V, CV)]
    if op.shift is not None:
        checks.append(_shift(op, V[:, 0], CV[:, 0]))
    if op.pieces is not None and type(op) is Hessian:
        checks.append(_difference(plain, exact, V[:, 0], CV[:, 0].double()))
    elif op.pieces is None and part_of(op) is not None:
        with suppress(UsageError, ModuleError):  # of a module that cannot be moved to other parameters
            checks += _of_part(plain, exact, V[:, 0], CV[:, 0].double())
    return checks


def _movable(op: CurvatureOperator, exact: Problem | None) -> Tensor | float:
    """Zero in the entries that finite differences must not move, rows of padding, else 1."""
    problem = op.problem if exact is None else exact
    if problem.model.spread is not None or part_of(op) is None:
        return 1.0
    with suppress(UsageError, ModuleError):
        one = next(iter(problem.batches)).map(problem.placed)[:1]
        return op.space.gather(movable(problem, one)).to(op.device, op.dtype)
    return 1.0


def _left_out(op: CurvatureOperator, checks: list[Check]) -> tuple[str, ...]:
    """What another model would have had: in pieces there is no copy to compare with, and some cannot move."""
    part = part_of(op)
    if part is None:
        return ()
    small = op.problem.model.num_parameters <= SMALL and op.problem.loss.splits
    wanted = ["finite difference" if part == "hessian" else "quadratic form", *(["columns"] if small else [])]
    there = {check.name for check in checks}
    return tuple(name for name in wanted if name not in there)


def kind_of(op: CurvatureOperator) -> tuple[Hashable, ...]:
    """What decides how an operator's products are made: class, engine, loss and model, without weights."""
    problem, engine = op.problem, op.engine
    how = str(op.dtype), op.device.type, engine.wanted, engine.checkpoint
    loss = type(problem.loss).__name__, problem.loss.name, plain(problem.loss.options)
    return type(op), structure(problem.model), *loss, *how


def short(op: CurvatureOperator) -> str:
    """Eight digits of the kind of an operator, in whatever process."""
    words = repr((type(op).__name__, *kind_of(op)[1:]))
    return hashlib.sha256(words.encode()).hexdigest()[:8]


def _of_part(op: CurvatureOperator, exact: Problem | None, v: Tensor, product: Tensor) -> list[Check]:
    """Finite differences, in float64 where that fits into memory, and the columns of a small model."""
    difference = _difference if part_of(op) == "hessian" else check_form
    if exact is not None:
        try:
            small = op.problem.model.num_parameters <= SMALL
            return [difference(op, exact, v, product), *(check_columns(op, exact) if small else [])]
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
    return [difference(op, None, v, product)]


def _symmetry(op: CurvatureOperator, V: Tensor, CV: Tensor) -> Check:
    error, allowed, kind = _asymmetry(V, CV), TOLERANCE[op.dtype], part_of(op)
    if error > allowed and kind is not None:
        plain = plain_products(kind, op.problem, op.space, V)
        noise = norm(own_rounding(op, V, CV)) / (norm(CV) or 1.0)
        allowed = allowed_by(allowed, max(noise, *(_asymmetry(V, one) for one in plain)))
    return Check("symmetry", error, allowed, "|uᵀCv − vᵀCu| / ‖Cv‖ for random signs u, v")


def _asymmetry(V: Tensor, CV: Tensor) -> float:
    (_, one), (other, _) = add_up(V.double().T @ CV.double()).tolist()
    size = float(norms(CV.double(), dim=0).mean())
    return abs(one - other) / size if size else abs(one - other)


def _shift(op: CurvatureOperator, v: Tensor, product: Tensor) -> Check:
    """What damping and weight decay add."""
    assert op.shift is not None, "looked at where there is one"
    right = product.double() + op.shift.diagonal(op.space).double() * v.double()
    found, size = (op @ v).double(), norm(right)
    words = "Cv against its parts, of which the first is checked below; relative to Cv"
    return Check("shift", norm(found - right) / size if size else norm(found), TOLERANCE[op.dtype], words)


def _exact(problem: Problem) -> Problem | None:
    """The problem in float64, all of whose parameters may vary; None where a copy is too large or refused."""
    model, point = problem.model, problem.point
    if problem.dtype != torch.float64:
        if problem.device.type == "mps" or model.num_parameters > COPIED or model.spread is not None:
            return None
        try:
            model = replace(model, module=copy.deepcopy(model.module).double(), widening=None)
        except Exception:  # whatever a module does that is not made to be copied
            return None
        point = {name: p.double() for name, p in point.items()}
    return Problem(model, list(problem.batches), problem.loss, params="*").at(point)


def _difference(op: CurvatureOperator, exact: Problem | None, v: Tensor, product: Tensor) -> Check:
    """The product against a difference of gradients, by the worst block."""
    problem = op.problem if exact is None else exact
    space, v = spaced(problem, op.space), v.to(problem.dtype)
    if exact is None:
        names = [block.name for block in space]
        step = ROUNDINGS * torch.finfo(v.dtype).eps * norm(problem.gradient(*names)) / NOISE
        step /= norm(product) or 1.0
        found, twice = (slope(problem, space, v, h) for h in (step, 2 * step))
        allowed = max(4 * _worst(twice, found, op), 4 * TOLERANCE[op.dtype])
        words = f"gradients in {v.dtype} at ±{step:.1e} and twice that, along random signs"
        return Check("finite difference", _worst(product, found, op), min(allowed, FAR), words)
    step, allowed = STEP * typical(problem, space), TOLERANCE[op.dtype]
    error = torch.inf
    for h in (step, step / 10):
        found = slope(problem, space, v, h)
        error = min(error, _worst(product, found, op))
        if error <= allowed:
            break
    else:
        V = v[:, None].to(op.dtype)
        plain = plain_products("hessian", op.problem, op.space, V)
        noise = _worst(found + own_rounding(op, V, product[:, None])[:, 0], found, op)
        allowed = allowed_by(allowed, max(noise, *(_worst(one[:, 0], found, op) for one in plain)))
    words = f"gradients in float64 at ±{step:.1e} along random signs; the worst block"
    return Check("finite difference", error, allowed, words)


def _worst(found: Tensor, right: Tensor, op: CurvatureOperator) -> float:
    """The largest ‖found − right‖ / ‖right‖ of a block, a block counting at least as its share of all."""
    even = SMALL_SHARE * norm(right) / op.shape[0] ** 0.5
    errors = []
    for block in op.space:
        rows = op.space.positions(block)
        size = max(norm(right[rows]), even * op.problem.model.size_of(block) ** 0.5)
        gap = norm((found - right)[rows])
        errors.append(gap / size if size else gap)
    return max(errors)


def slope(problem: Problem, space: ParamSpace, v: Tensor, h: float) -> Tensor:
    """(∇L(θ + hv) − ∇L(θ − hv)) / 2h in float64."""
    own = space.in_blocks()
    names = [block.name for block in own]
    up, down = (end.gradient(*names).double() for end in _ends(problem, space, v, h))
    return own.convert((up - down) / (2 * h), space)


def outer_form(problem: Problem, space: ParamSpace, v: Tensor, h: float) -> float:
    """(1/N) Σ ⟨Jv, M Jv⟩ with Jv = (z(θ + hv) − z(θ − hv)) / 2h and M of the outputs between the two."""
    ends, total = _ends(problem, space, v, h), 0.0
    for batch in problem.placed_batches("verification"):
        z = []
        for end in ends:
            with (
                differentiating(),
                torch.no_grad(),
                RefuseHeld(dict(end.model.named_parameters()), end.point),
            ):
                z.append(end.outputs(batch))
        up, down = z
        moved = (up - down) / (2 * h)
        bent = loss_curvature(problem, batch, (up + down) / 2, moved)
        total += float((moved.double() * bent.double()).sum())
    return total / problem.num_terms


def _ends(problem: Problem, space: ParamSpace, v: Tensor, h: float) -> list[Problem]:
    tree, own = space.scatter(v), dict(problem.named_parameters())
    return [
        problem.at({name: (own[name] + sign * h * t).detach() for name, t in tree.items()})
        for sign in (1, -1)
    ]


def typical(problem: Problem, space: ParamSpace) -> float:
    """The root mean square of the parameters of a space; 1 where all are zero."""
    theta = space.gather({name: problem.get_parameter(name).detach() for name in space.parameter_names})
    return norm(theta) / max(problem.model.size_of(*space), 1) ** 0.5 or 1.0


MOST = 8  # columns


def check_ranks(op: CurvatureOperator) -> Check:
    """Of one column, and of one for each rank: by sequences or by columns, as they are divided."""
    _, ranks = place()
    V = probes(op.shape[0], min(ranks, MOST), seed=SEED, dtype=op.dtype, device=op.device)
    one, all_of_them = op @ V[:, :1], op @ V

    def gap() -> float:
        alone = (op @ V).double()
        sizes = [norm(alone[:, :1]), norm(alone)]
        gaps = [norm(one.double() - alone[:, :1]), norm(all_of_them.double() - alone)]
        return max(g / s if s else g for g, s in zip(gaps, sizes, strict=True))

    words = f"products that {ranks} ranks make together against those of one alone, relative to them"
    return Check("ranks", from_first(gap), TOLERANCE[op.dtype], words)


STEPS = {torch.float64: 1e-6, torch.float32: 5e-3}  # in units of the root mean square of the parameters
OF_BOTH = 0.01  # of |vᵀHv| + |vᵀGv|: what their difference is measured by at least
RELATIVE = "relative to the larger of it and ‖Cv‖"


def check_form(op: CurvatureOperator, exact: Problem | None, v: Tensor, product: Tensor) -> Check:
    """vᵀCv of the GGN or the functional Hessian, from C v in float64."""
    kind = part_of(op)
    assert kind is not None, "the parts of the Hessian have forms"
    problem = op.problem if exact is None else exact
    space, v = spaced(problem, op.space), v.to(problem.dtype)
    form, size = float(v.double() @ product), norm(product)
    step, limit = STEPS[problem.dtype] * typical(problem, space), TOLERANCE[op.dtype]
    if exact is None:
        (right, least), (twice, _) = (_right(kind, problem, space, v, h) for h in (step, 2 * step))
        size = max(size, least)
        allowed = min(max(4 * _off(twice, right, size), 4 * TOLERANCE[op.dtype]), FAR)
        words = f"outputs in {v.dtype} at ±{step:.1e} and twice that, along random signs; {RELATIVE}"
        return Check("quadratic form", _off(form, right, size), allowed, words)
    error, right, least = torch.inf, 0.0, size
    for h in (step, step / 10):
        right, least = _right(kind, problem, space, v, h)
        error = min(error, _off(form, right, max(size, least)))
        if error <= limit:
            break
    else:
        noise = norm(own_rounding(op, v[:, None].to(op.dtype), product[:, None])) / (max(size, least) or 1.0)
        limit = allowed_by(limit, max(noise, _rounding(kind, op, v.to(op.dtype), right, max(size, least))))
    words = f"vᵀCv from outputs in float64 at ±{step:.1e} along random signs v; {RELATIVE}"
    return Check("quadratic form", error, limit, words)


def _right(kind: MatrixName, problem: Problem, space: ParamSpace, v: Tensor, h: float) -> tuple[float, float]:
    """vᵀCv, and what it is measured by at least."""
    outer = outer_form(problem, space, v, h)
    if kind == "ggn":
        return outer, 0.0
    whole = float(v.double() @ slope(problem, space, v, h))
    return whole - outer, OF_BOTH * (abs(whole) + abs(outer))


def _off(form: float, right: float, size: float) -> float:
    gap, size = abs(form - right), max(abs(right), size)
    return gap / size if size else gap


def _rounding(kind: MatrixName, op: CurvatureOperator, v: Tensor, right: float, size: float) -> float:
    """How far the form of plain autograd in the operator's own precision is from what is right."""
    found = plain_products(kind, op.problem, op.space, v[:, None])
    apart = max(norm(found[0] - other) for other in found[1:])
    off = max(_off(float(v.double() @ x[:, 0]), right, size) for x in found)
    return max(off, apart / size if size else apart)
