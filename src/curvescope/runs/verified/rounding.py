"""What a product may be off by: a bound, or ten times what plain autograd is off by where that is more.

The bound of float32 is no tighter because of models that are sure of their answers: few digits are left there
of p (u − ⟨p, u⟩), and of ways to compute it some keep more than others.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from curvescope.algorithms.sums import add_up
from curvescope.core.blocks import ParamSpace
from curvescope.operators.base import CurvatureOperator
from curvescope.problem import Problem
from curvescope.runs.verified.plain import a_rounding_away

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
