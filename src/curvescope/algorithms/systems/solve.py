"""Linear systems (A + λ I) x = b, by products alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import (
    check_choice,
    check_count,
    check_number,
    check_operator,
    check_square,
    check_symmetric,
    of_one_matrix,
    relative_tolerance,
)
from curvescope.algorithms.spectra.krylov import lanczos
from curvescope.algorithms.sums import norms, to_numpy
from curvescope.algorithms.systems.iterations import Multiply, Stop, conjugate_gradients
from curvescope.algorithms.systems.lsmr import LEAST_SQUARES, least_squares
from curvescope.algorithms.systems.minres import minimal_residuals
from curvescope.algorithms.systems.neumann import neumann_series
from curvescope.algorithms.systems.rounds import Iteration, Refined, System, refined, rescale
from curvescope.algorithms.vectors import columns_of, comfortable, on_all
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import LinearOperator, Vector, as_columns
from curvescope.core.operator.kinds import is_single, like
from curvescope.core.result import Result
from curvescope.core.seeds import probes

Method = Literal["cg", "minres", "lsmr", "neumann"]
STEPS = 20  # of Lanczos, for the size of the largest eigenvalue


@dataclass(frozen=True)
class Solution(Result):
    """Solution of a linear system, with the residual that was measured."""

    x: Tensor  # (n,) or (n, k), as the right-hand side; NumPy if that was
    residual: np.ndarray  # () or (k,): ‖b − (A + λ I) x‖ / ‖b‖, or 0 where b is zero
    converged: bool  # every residual is at most tol; for "lsmr", or ‖Aᵀ r‖ is at most tol ‖A‖ ‖r‖
    reason: str  # why it stopped
    num_products: int  # products with one vector
    tol: float
    method: str
    damping: float


@of_one_matrix
def solve(
    op: LinearOperator,
    b: Vector,
    *,
    method: Method = "cg",
    damping: float = 0.0,
    tol: float | None = None,
    max_products: int | None = None,
    preconditioner: LinearOperator | None = None,
    scale: float | None = None,
) -> Solution:
    """Solve (A + damping · I) x = b for one right-hand side or several (n, k), all in lock step.

    Memory, for each right-hand side, besides it and what a product takes: 5 vectors for "cg", 6 for "minres",
    2 more after fifty steps or where b may lie outside the range, 7 for "lsmr", 5 for "neumann"; one more
    with damping, two with a preconditioner.

    Args:
        method: "cg", conjugate gradients, for positive definite systems: `op` must be declared psd, or
            damped. A direction of no or negative curvature ends that column and is named in `reason`.
            "minres", minimal residuals, for any symmetric operator; where b is not in the range it gives
            a least-squares solution, `converged` false.
            "lsmr", least squares min ‖A x − b‖ for any operator with transposed products, square or not; of
            several solutions the shortest. A step takes two products. It ends where ‖Aᵀ r‖ ≤ tol ‖A‖ ‖r‖ too:
            what b has along singular values below tol times the largest is cut off, as what lies outside the
            range is, and `reason` says so; a smaller tol takes it in.
            "neumann", the series s Σ (I − s A)ʲ b for positive definite systems.
        tol: relative residual that counts as converged; 1e-8 in float64, 1e-4 in float32.
        max_products: most products for each right-hand side; min(10 n + 10, 1000) by default, twice that
            for "lsmr".
        preconditioner: M near the inverse of the system, (n, n): symmetric and positive definite for "cg" and
            "minres"; "lsmr" takes it from the right, min ‖A M y − b‖ with x = M y.
        scale: s of "neumann"; one over the largest eigenvalue by default, or 1 with a preconditioner.
    """
    check_choice("method", method, get_args(Method))
    _check_system(op, method)
    damping = check_number("damping", damping, at_least=0.0)
    if damping:
        check_square(op, "damping")
    tol = relative_tolerance(tol, op.dtype)
    B = _right_hand_sides(op, b)
    if method in ("cg", "neumann") and not op.psd and damping == 0:
        raise UsageError(
            f"method={method!r} needs an operator declared psd or a damping above 0, "
            f"got {op!r} with psd=False",
            hint="use cs.GGN, which is psd, or a damping above the most negative curvature; "
            "or use method='minres', which needs many products where eigenvalues of both signs are near zero",
        )
    limit = min(10 * max(op.shape) + 10, 1000) * (2 if method == "lsmr" else 1)
    if max_products is not None:
        limit = check_count("max_products", max_products, at_least=2)
    sizes = [comfortable(column) or 1.0 for column in B.T]
    if any(size != 1.0 for size in sizes):
        B = B * torch.tensor(sizes, dtype=B.dtype, device=B.device)
    system = System(op, damping)
    found = refined(_iteration(system, method, preconditioner, tol, scale), system, B, tol, limit)
    X, residual, reason, used = found.X, found.residual, found.reason, found.used
    least, used = _least_squares(system, found, tol, used) if reason == LEAST_SQUARES else (False, used)
    factor = system.factor or 1.0
    fits = [rescale(x, factor, 1 / size, tol) for x, size in zip(X.T, sizes, strict=True)]
    X, residual = (X[:, 0], residual[0]) if is_single(b) else (X, residual)
    small = bool(np.all(residual <= tol))
    converged = (small or least) and all(fits)
    if not all(fits):
        reason = f"the solution is outside the range of {op.dtype}: multiply A or b by a number"
    elif converged:
        reason = "converged" if small else LEAST_SQUARES
    return Solution(
        x=like(X, b),
        residual=np.asarray(residual),
        converged=converged,
        reason=reason,
        num_products=used * B.shape[1],
        tol=tol,
        method=method,
        damping=damping,
    )


def _check_system(op: LinearOperator, method: Method) -> None:
    if method == "lsmr":
        check_operator(op, "solve")
    else:
        check_symmetric(op, "solve")


def _right_hand_sides(op: LinearOperator, b: Vector) -> Tensor:
    """Columns (m, k), finite and at least one."""
    B = as_columns(op.T, b)
    if B.shape[1] == 0:
        raise UsageError("expected at least one right-hand side, got columns of shape (n, 0)")
    if not on_all(bool(torch.isfinite(B).all()), op.device):
        raise UsageError("expected a finite right-hand side, got nan or inf")
    return B


def _iteration(
    system: System, method: Method, M: LinearOperator | None, tol: float, scale: float | None
) -> Iteration:
    """The method, bound to its preconditioner and its own settings."""
    _check_preconditioner(system.op, M, method)
    if scale is not None and method != "neumann":
        raise UsageError(f"scale belongs to method='neumann', got it with method={method!r}")
    precondition = None if M is None else System(M, 0.0)
    if method == "cg":
        return partial(conjugate_gradients, precondition=precondition)
    if method == "minres":
        return partial(minimal_residuals, precondition=precondition)
    if method == "neumann":
        longest = 1.0 if precondition is not None else _longest_step(system)
        s = longest if scale is None else check_number("scale", scale, above=0.0)
        parts = [system] if precondition is None else [system, precondition]
        # what brings the products near one is taken off again
        return partial(
            neumann_series,
            precondition=precondition,
            scale=lambda: s / math.prod(part.factor or 1.0 for part in parts),
        )

    return _lsmr(system, M, 0.5 * tol)


def _lsmr(system: System, M: LinearOperator | None, tol: float) -> Iteration:
    """Least squares with A, or with A M and x = M y."""
    through = (lambda V: V) if M is None else M.__matmul__
    back = (lambda V: V) if M is None else M.T.__matmul__

    def iterate(product: Multiply, B: Tensor, target: Tensor, limit: int) -> tuple[Tensor, Stop, int]:
        Y, stop, used = least_squares(
            lambda V: product(through(V)), lambda U: back(system.transposed(U)), B, target, tol, limit
        )
        return through(Y), stop, used

    return iterate


def _check_preconditioner(op: LinearOperator, M: LinearOperator | None, method: Method) -> None:
    if M is None:
        return
    if not isinstance(M, LinearOperator):
        raise UsageError(f"expected a LinearOperator as preconditioner, got {type(M).__name__}")
    n = op.shape[1]
    if (
        M.shape != (n, n)
        or M.local_shape != (op.local_shape[1], op.local_shape[1])
        or M.dtype != op.dtype
        or M.device.type != op.device.type
    ):
        raise ShapeError(f"expected a preconditioner of {n} × {n} in {op.dtype} on {op.device}, got {M!r}")
    if method in ("cg", "minres") and not M.symmetric:
        raise UsageError(f"method={method!r} needs a symmetric preconditioner, got {M!r}")


def _longest_step(system: System) -> float:
    """1 / θ for the largest Ritz value θ of A + λ I after a few steps: surely less than 2 / λ_max."""
    op = system.op
    where = {"dtype": op.dtype, "device": op.device, "pieces": columns_of(op)}
    start = probes(op.shape[0], 1, seed=0, **where)
    largest = float(lanczos(op, start, STEPS).quadrature()[0].max()) + system.damping
    return 1 / largest if largest > 0 else 1.0


def _least_squares(system: System, found: Refined, tol: float, used: int) -> tuple[bool, int]:
    """Whether every column that is no solution has ‖Aᵀ r‖ ≤ tol ‖A‖ ‖r‖, as measured; products used."""
    slope, left = to_numpy(norms(system.transposed(found.R), dim=0)), to_numpy(norms(found.R, dim=0))
    return bool(((slope <= tol * found.size * left) | (found.residual <= tol)).all()), used + 1
