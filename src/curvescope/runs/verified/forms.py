"""The quadratic form of the two parts of the Hessian, against finite differences of outputs and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from curvescope.core.blocks import ParamSpace
from curvescope.core.parts import MatrixName
from curvescope.operators.base import CurvatureOperator
from curvescope.problem import Problem
from curvescope.runs.verified.checks import Check
from curvescope.runs.verified.differences import outer_form, slope, typical
from curvescope.runs.verified.plain import part_of, plain_products
from curvescope.runs.verified.rounding import FAR, TOLERANCE, allowed_by, norm, own_rounding, spaced

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
