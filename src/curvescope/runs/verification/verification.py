"""Verification of a run's products by computations that share no code with them.

The checks run at the first product of each kind of symmetric operator C over n parameters, with random signs
u and v:

    symmetry            |uᵀCv − vᵀCu| / ‖Cv‖, for one direction about ‖C − Cᵀ‖_F / ‖C‖_F
    finite difference   of the Hessian: ‖D − Hv‖ / ‖Hv‖ with D = (∇L(θ + hv) − ∇L(θ − hv)) / 2h
    quadratic form      of its parts: vᵀGv against (1/N) Σ ⟨Jv, M Jv⟩ with Jv = (z(θ + hv) − z(θ − hv)) / 2h
                        and M = ∂²ℓ/∂z², and vᵀFv against vᵀD − vᵀGv; relative to the larger of |vᵀCv| and
                        ‖Cv‖
    columns             of the three for a small model, on a few positions: block by block (`columns`)

Gradients and outputs come from plain autograd in float64, on the model itself or on a temporary copy. There h
= 1e-6 times the typical size of a parameter is far above rounding and far below the distance to a kink of a
ReLU. If a kink lies within the step, a tenth of the step is tried. If an error exceeds its tolerance, ten
times the error of plain autograd in the same precision is allowed (`tolerance_with_rounding`). A model
too large for a copy is differentiated in its own float32, with a step that limits rounding to a thousandth; a
second, twice as long step estimates the error. The finite difference is checked block by block, so that a
large block does not hide a small one.

For a sharded model, all ranks check together, each its own shards, and obtain the same errors. These checks
are symmetry, and for the Hessian the finite difference.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import norms, sum_over_ranks
from curvescope.algorithms.vectors import columns_of
from curvescope.core.blocks import ParamSpace
from curvescope.core.errors import ModuleError, UsageError
from curvescope.core.hessian_terms import MatrixName
from curvescope.core.ranks import current_division, on_first_rank, rank_and_size
from curvescope.core.ranks.shard_layout import sharded_over
from curvescope.core.seeds import probes
from curvescope.engines.derivatives import movable
from curvescope.engines.memory import ran_out
from curvescope.models.running.aliased_parameters import RefuseAliased
from curvescope.operators import Hessian
from curvescope.operators.base import CurvatureOperator
from curvescope.problem import Problem, differentiating
from curvescope.runs.model_structure import plain_text, structure
from curvescope.runs.verification.autograd_reference import (
    FAR,
    SEED,
    TOLERANCE,
    global_norm,
    loss_curvature,
    matrix_name,
    plain_products,
    rounding_of_operator,
    space_like,
    tolerance_with_rounding,
    without_shift,
)
from curvescope.runs.verification.checks import ErrorCheck, Verification
from curvescope.runs.verification.columns import check_columns

STEP = 1e-6  # step in float64, in units of the root mean square of the parameters
NOISE, ROUNDINGS = 1e-3, 32  # float32: share of rounding in a difference, and roundings in a gradient
SMALL_SHARE = 0.01  # smallest denominator of a block: this share of ‖Hv‖, spread evenly over the entries
COPIED = 2**27  # most parameters for which a float64 copy of the model is made
SMALL = 2**20  # most parameters of a small model, whose columns are checked


def verify_by_all(op: CurvatureOperator) -> Verification | None:
    """Verify an operator on all ranks.

    Rank 0 checks the operator that it computes alone; then all ranks check that the distributed product is
    the same. If the operator is sharded, all ranks check it together.
    """
    if op.shards is not None:
        return verify(op)
    verification = on_first_rank(lambda: verify(op))
    if verification is None or current_division() is None:
        return verification
    return replace(verification, checks=(*verification.checks, check_ranks(op)))


def verify(op: CurvatureOperator) -> Verification | None:
    """Check products of an operator; return None if it is not square and symmetric.

    This takes two products and two or four gradients or forward passes, and for a small model also columns on
    a few positions. Fishers and sources are checked for symmetry only, and so are modules with further
    references to a parameter (a closure, a list).
    """
    if not op.symmetric or op.dtype not in TOLERANCE or op.shape[0] == 0:
        return None
    with sharded_over(op.problem.model.spread):
        checks = _checks(op)
    names = type(op).__name__, op.problem.model.name, str(op.dtype).removeprefix("torch.")
    return Verification(*names, tuple(checks), _skipped_checks(op, checks), kind=kind_digest(op))


def _checks(op: CurvatureOperator) -> list[ErrorCheck]:
    shard = columns_of(op)
    V = probes(op.shape[0], 2, seed=SEED, dtype=op.dtype, device=op.device, shard=shard)
    plain, exact = without_shift(op), _float64_copy(op.problem)
    V[:, 0] *= _movable_mask(op, exact)
    CV = plain @ V
    checks = [_check_symmetry(plain, V, CV)]
    if op.shift is not None:
        checks.append(_check_shift(op, V[:, 0], CV[:, 0]))
    if op.shards is not None and type(op) is Hessian:
        checks.append(_check_gradient_difference(plain, exact, V[:, 0], CV[:, 0].double()))
    elif op.shards is None and matrix_name(op) is not None:
        with suppress(UsageError, ModuleError):  # The module cannot be evaluated at other parameters.
            checks += _check_part(plain, exact, V[:, 0], CV[:, 0].double())
    return checks


def _movable_mask(op: CurvatureOperator, exact: Problem | None) -> Tensor | float:
    """Mask with zeros for entries that finite differences must not change (rows of padding), else 1."""
    problem = op.problem if exact is None else exact
    if problem.model.spread is not None or matrix_name(op) is None:
        return 1.0
    with suppress(UsageError, ModuleError):
        sequence = next(iter(problem.batches)).map(problem.placed)[:1]
        return op.space.gather(movable(problem, sequence)).to(op.device, op.dtype)
    return 1.0


def _skipped_checks(op: CurvatureOperator, checks: list[ErrorCheck]) -> tuple[str, ...]:
    """Return the checks that a sharded model does not allow, because no copy of it can be made."""
    part = matrix_name(op)
    if part is None:
        return ()
    small = op.problem.model.num_parameters <= SMALL and op.problem.loss.has_outputs
    expected = [
        "finite difference" if part == "hessian" else "quadratic form",
        *(["columns"] if small else []),
    ]
    made = {check.name for check in checks}
    return tuple(name for name in expected if name not in made)


def kind_of(op: CurvatureOperator) -> tuple[Hashable, ...]:
    """Key of everything that decides how an operator computes: class, engine, loss, model structure."""
    problem, engine = op.problem, op.engine
    how = str(op.dtype), op.device.type, engine.requested, engine.checkpoint
    loss = type(problem.loss).__name__, problem.loss.name, plain_text(problem.loss.options)
    return type(op), structure(problem.model), *loss, *how


def kind_digest(op: CurvatureOperator) -> str:
    """Digest of the kind of an operator, eight digits, the same in every process."""
    words = repr((type(op).__name__, *kind_of(op)[1:]))
    return hashlib.sha256(words.encode()).hexdigest()[:8]


def _check_part(op: CurvatureOperator, exact: Problem | None, v: Tensor, product: Tensor) -> list[ErrorCheck]:
    """Check finite differences, in float64 if that fits into memory, and the columns of a small model."""
    difference = _check_gradient_difference if matrix_name(op) == "hessian" else check_form
    if exact is not None:
        try:
            small = op.problem.model.num_parameters <= SMALL
            return [difference(op, exact, v, product), *(check_columns(op, exact) if small else [])]
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error):
                raise
    return [difference(op, None, v, product)]


def _check_symmetry(op: CurvatureOperator, V: Tensor, CV: Tensor) -> ErrorCheck:
    error, allowed, kind = _asymmetry(V, CV), TOLERANCE[op.dtype], matrix_name(op)
    if error > allowed and kind is not None:
        plain = plain_products(kind, op.problem, op.space, V)
        noise = global_norm(rounding_of_operator(op, V, CV)) / (global_norm(CV) or 1.0)
        allowed = tolerance_with_rounding(allowed, max(noise, *(_asymmetry(V, product) for product in plain)))
    return ErrorCheck("symmetry", error, allowed, "|uᵀCv − vᵀCu| / ‖Cv‖ for random signs u, v")


def _asymmetry(V: Tensor, CV: Tensor) -> float:
    (_, uCv), (vCu, _) = sum_over_ranks(V.double().T @ CV.double()).tolist()
    size = float(norms(CV.double(), dim=0).mean())
    return abs(uCv - vCu) / size if size else abs(uCv - vCu)


def _check_shift(op: CurvatureOperator, v: Tensor, product: Tensor) -> ErrorCheck:
    """Check the contribution of damping and weight decay."""
    assert op.shift is not None, "the caller checks that there is a shift"
    right = product.double() + op.shift.diagonal(op.space).double() * v.double()
    shift_product, size = (op @ v).double(), global_norm(right)
    words = "Cv against the sum of its parts (the first is checked below), relative to Cv"
    return ErrorCheck(
        "shift",
        global_norm(shift_product - right) / size if size else global_norm(shift_product),
        TOLERANCE[op.dtype],
        words,
    )


def _float64_copy(problem: Problem) -> Problem | None:
    """Return the problem in float64 with all parameters trainable; None if a copy is too large or fails."""
    model, point = problem.model, problem.point
    if problem.dtype != torch.float64:
        if problem.device.type == "mps" or model.num_parameters > COPIED or model.spread is not None:
            return None
        try:
            model = replace(model, module=copy.deepcopy(model.module).double(), widening=None)
        except Exception:  # A module that cannot be copied may raise anything.
            return None
        point = {name: p.double() for name, p in point.items()}
    return Problem(model, list(problem.batches), problem.loss, params="*").at(point)


def _check_gradient_difference(
    op: CurvatureOperator, exact: Problem | None, v: Tensor, product: Tensor
) -> ErrorCheck:
    """Compare the product with a difference of gradients; the worst block counts."""
    problem = op.problem if exact is None else exact
    space, v = space_like(problem, op.space), v.to(problem.dtype)
    if exact is None:
        names = [block.name for block in space]
        step = ROUNDINGS * torch.finfo(v.dtype).eps * global_norm(problem.gradient(*names)) / NOISE
        step /= global_norm(product) or 1.0
        found, twice = (gradient_difference(problem, space, v, h) for h in (step, 2 * step))
        allowed = max(4 * _worst_block_error(twice, found, op), 4 * TOLERANCE[op.dtype])
        words = f"gradients in {v.dtype} at ±{step:.1e} and twice that, along random signs"
        return ErrorCheck(
            "finite difference", _worst_block_error(product, found, op), min(allowed, FAR), words
        )
    step, allowed = STEP * rms_parameter(problem, space), TOLERANCE[op.dtype]
    error = torch.inf
    for h in (step, step / 10):
        found = gradient_difference(problem, space, v, h)
        error = min(error, _worst_block_error(product, found, op))
        if error <= allowed:
            break
    else:
        V = v[:, None].to(op.dtype)
        plain = plain_products("hessian", op.problem, op.space, V)
        noise = _worst_block_error(found + rounding_of_operator(op, V, product[:, None])[:, 0], found, op)
        allowed = tolerance_with_rounding(
            allowed, max(noise, *(_worst_block_error(columns[:, 0], found, op) for columns in plain))
        )
    words = f"gradients in float64 at ±{step:.1e} along random signs; the worst block"
    return ErrorCheck("finite difference", error, allowed, words)


def _worst_block_error(found: Tensor, right: Tensor, op: CurvatureOperator) -> float:
    """Largest relative error ‖found − right‖ / ‖right‖ of a block.

    The denominator is at least the block's share of ‖right‖.
    """
    even = SMALL_SHARE * global_norm(right) / op.shape[0] ** 0.5
    errors = []
    for block in op.space:
        rows = op.space.positions(block)
        size = max(global_norm(right[rows]), even * op.problem.model.size_of(block) ** 0.5)
        gap = global_norm((found - right)[rows])
        errors.append(gap / size if size else gap)
    return max(errors)


def gradient_difference(problem: Problem, space: ParamSpace, v: Tensor, h: float) -> Tensor:
    """(∇L(θ + hv) − ∇L(θ − hv)) / 2h in float64."""
    in_blocks = space.in_blocks()
    names = [block.name for block in in_blocks]
    up, down = (end.gradient(*names).double() for end in _problems_at_ends(problem, space, v, h))
    return in_blocks.convert((up - down) / (2 * h), space)


def ggn_form(problem: Problem, space: ParamSpace, v: Tensor, h: float) -> float:
    """(1/N) Σ ⟨Jv, M Jv⟩ with Jv = (z(θ + hv) − z(θ − hv)) / 2h and M of the outputs between the two."""
    ends, total = _problems_at_ends(problem, space, v, h), 0.0
    for batch in problem.placed_batches("verification"):
        z = []
        for end in ends:
            with (
                differentiating(),
                torch.no_grad(),
                RefuseAliased(dict(end.model.named_parameters()), end.point),
            ):
                z.append(end.outputs(batch))
        up, down = z
        Jv = (up - down) / (2 * h)
        bent = loss_curvature(problem, batch, (up + down) / 2, Jv)
        total += float((Jv.double() * bent.double()).sum())
    return total / problem.num_terms


def _problems_at_ends(problem: Problem, space: ParamSpace, v: Tensor, h: float) -> list[Problem]:
    tree, parameters = space.scatter(v), dict(problem.named_parameters())
    return [
        problem.at({name: (parameters[name] + sign * h * t).detach() for name, t in tree.items()})
        for sign in (1, -1)
    ]


def rms_parameter(problem: Problem, space: ParamSpace) -> float:
    """The root mean square of the parameters of a space; 1 where all are zero."""
    theta = space.gather({name: problem.get_parameter(name).detach() for name in space.parameter_names})
    return global_norm(theta) / max(problem.model.size_of(*space), 1) ** 0.5 or 1.0


MOST = 8  # columns


def check_ranks(op: CurvatureOperator) -> ErrorCheck:
    """Check one column, and then one column per rank, distributed by sequences or by columns."""
    _, ranks = rank_and_size()
    V = probes(op.shape[0], min(ranks, MOST), seed=SEED, dtype=op.dtype, device=op.device)
    single, distributed = op @ V[:, :1], op @ V

    def gap() -> float:
        alone = (op @ V).double()
        sizes = [global_norm(alone[:, :1]), global_norm(alone)]
        gaps = [global_norm(single.double() - alone[:, :1]), global_norm(distributed.double() - alone)]
        return max(g / s if s else g for g, s in zip(gaps, sizes, strict=True))

    words = f"products that {ranks} ranks compute together against those of one rank, relative to the latter"
    return ErrorCheck("ranks", on_first_rank(gap), TOLERANCE[op.dtype], words)


STEPS = {torch.float64: 1e-6, torch.float32: 5e-3}  # steps in units of the root mean square of the parameters
OF_BOTH = 0.01  # smallest denominator of the difference: this share of |vᵀHv| + |vᵀGv|
RELATIVE = "relative to the larger of |vᵀCv| and ‖Cv‖"


def check_form(op: CurvatureOperator, exact: Problem | None, v: Tensor, product: Tensor) -> ErrorCheck:
    """Check vᵀCv of the GGN or the functional Hessian, with C v in float64."""
    kind = matrix_name(op)
    assert kind is not None, "the parts of the Hessian have forms"
    problem = op.problem if exact is None else exact
    space, v = space_like(problem, op.space), v.to(problem.dtype)
    form, size = float(v.double() @ product), global_norm(product)
    step, limit = STEPS[problem.dtype] * rms_parameter(problem, space), TOLERANCE[op.dtype]
    if exact is None:
        (right, least), (twice, _) = (_reference_form(kind, problem, space, v, h) for h in (step, 2 * step))
        size = max(size, least)
        allowed = min(max(4 * _relative_error(twice, right, size), 4 * TOLERANCE[op.dtype]), FAR)
        words = f"outputs in {v.dtype} at ±{step:.1e} and twice that, along random signs; {RELATIVE}"
        return ErrorCheck("quadratic form", _relative_error(form, right, size), allowed, words)
    error, right, least = torch.inf, 0.0, size
    for h in (step, step / 10):
        right, least = _reference_form(kind, problem, space, v, h)
        error = min(error, _relative_error(form, right, max(size, least)))
        if error <= limit:
            break
    else:
        noise = global_norm(rounding_of_operator(op, v[:, None].to(op.dtype), product[:, None])) / (
            max(size, least) or 1.0
        )
        limit = tolerance_with_rounding(
            limit, max(noise, _rounding_error(kind, op, v.to(op.dtype), right, max(size, least)))
        )
    words = f"vᵀCv from outputs in float64 at ±{step:.1e} along random signs v; {RELATIVE}"
    return ErrorCheck("quadratic form", error, limit, words)


def _reference_form(
    kind: MatrixName, problem: Problem, space: ParamSpace, v: Tensor, h: float
) -> tuple[float, float]:
    """Return vᵀCv and the smallest denominator of its error."""
    outer = ggn_form(problem, space, v, h)
    if kind == "ggn":
        return outer, 0.0
    hessian_form = float(v.double() @ gradient_difference(problem, space, v, h))
    return hessian_form - outer, OF_BOTH * (abs(hessian_form) + abs(outer))


def _relative_error(form: float, right: float, size: float) -> float:
    gap, size = abs(form - right), max(abs(right), size)
    return gap / size if size else gap


def _rounding_error(kind: MatrixName, op: CurvatureOperator, v: Tensor, right: float, size: float) -> float:
    """Rounding error of plain autograd in the operator's own precision."""
    products = plain_products(kind, op.problem, op.space, v[:, None])
    spread = max(global_norm(products[0] - product) for product in products[1:])
    off = max(_relative_error(float(v.double() @ x[:, 0]), right, size) for x in products)
    return max(off, spread / size if size else spread)
