"""Linear systems (A + λ I) x = b, solved by products only.

Neumann's series, A⁻¹ b = s Σ_j (I − s A)ʲ b, on several right-hand sides in lock step.

Its partial sums are the steps of Richardson's iteration x + s M (b − A x), with a preconditioner M or none.
They converge if all eigenvalues of s M A lie between 0 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import column_dots, norms, to_numpy
from curvescope.algorithms.checks import (
    check_choice,
    check_count,
    check_number,
    check_operator,
    check_square,
    check_symmetric,
    fixed_operator,
    relative_tolerance,
)
from curvescope.algorithms.spectra.krylov import lanczos
from curvescope.algorithms.systems.iterations import (
    LEAST_SQUARES,
    Multiply,
    Stop,
    conjugate_gradients,
    descend,
    distance,
    least_squares,
    minimal_residuals,
)
from curvescope.algorithms.vectors import check_finite, columns_of, holds_on_all_ranks, safe_vector_scale
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import LinearOperator, Vector, as_columns
from curvescope.core.operator.kinds import as_kind, is_single_vector
from curvescope.core.progress import track
from curvescope.core.result import Result
from curvescope.core.seeds import probes

Method = Literal["cg", "minres", "lsmr", "neumann"]
STEPS = 20  # Lanczos steps for the size of the largest eigenvalue


@dataclass(frozen=True)
class Solution(Result):
    """Solution of a linear system, with its measured residual."""

    x: Tensor  # (n,) or (n, k) like the right-hand side; a NumPy array if b is one
    residual: np.ndarray  # () or (k,): ‖b − (A + λ I) x‖ / ‖b‖, or 0 if b is zero
    converged: bool  # every residual is at most tol; for "lsmr", or ‖Aᵀ r‖ is at most tol ‖A‖ ‖r‖
    reason: str  # reason for stopping
    num_products: int  # products with one vector
    tol: float
    method: str
    damping: float


@fixed_operator
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

    Memory for each right-hand side, besides the memory of a product: 5 vectors for "cg"; 6 for "minres", and
    2 more after fifty steps or if b may lie outside the range; 7 for "lsmr"; 5 for "neumann". Damping needs
    one more, a preconditioner two.

    Args:
        method: "cg", conjugate gradients, for positive definite systems: `op` must be declared psd, or
            damped. A direction of zero or negative curvature ends its column and is named in `reason`.
            "minres", minimal residuals, for any symmetric operator; if b is not in the range it gives a
            least-squares solution, `converged` false. "lsmr", least squares min ‖A x − b‖ for any operator
            with transposed products, square or not; among several solutions the shortest. A step takes two
            products. It also ends if ‖Aᵀ r‖ ≤ tol ‖A‖ ‖r‖: parts of b along singular values below tol times
            the largest are ignored, like those outside the range, and `reason` says so; a smaller tol
            includes them. "neumann", the series s Σ (I − s A)ʲ b for positive definite systems.
        tol: Relative residual that counts as converged; 1e-8 in float64, 1e-4 in float32.
        max_products: Largest number of products for each right-hand side; by default min(10 n + 10, 1000),
            twice that for "lsmr".
        preconditioner: M, an approximate inverse of the system, (n, n): symmetric and positive definite for
            "cg" and "minres"; "lsmr" applies it from the right, min ‖A M y − b‖ with x = M y.
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
            "or use method='minres', which needs many products if eigenvalues of both signs are near zero",
        )
    limit = min(10 * max(op.shape) + 10, 1000) * (2 if method == "lsmr" else 1)
    if max_products is not None:
        limit = check_count("max_products", max_products, at_least=2)
    sizes = [safe_vector_scale(column) or 1.0 for column in B.T]
    if any(size != 1.0 for size in sizes):
        B = B * torch.tensor(sizes, dtype=B.dtype, device=B.device)
    system = System(op, damping)
    solved = refined(_iteration(system, method, preconditioner, tol, scale), system, B, tol, limit)
    X, residual, reason, used = solved.X, solved.residual, solved.reason, solved.used
    least, used = _least_squares(system, solved, tol, used) if reason == LEAST_SQUARES else (False, used)
    factor = system.factor or 1.0
    is_in_range = [rescale(x, factor, 1 / size, tol) for x, size in zip(X.T, sizes, strict=True)]
    X, residual = (X[:, 0], residual[0]) if is_single_vector(b) else (X, residual)
    small = bool(np.all(residual <= tol))
    converged = (small or least) and all(is_in_range)
    if not all(is_in_range):
        reason = f"the solution is outside the range of {op.dtype}: multiply A or b by a number"
    elif converged:
        reason = "converged" if small else LEAST_SQUARES
    return Solution(
        x=as_kind(X, b),
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
    if not holds_on_all_ranks(bool(torch.isfinite(B).all()), op.device):
        raise UsageError("expected a finite right-hand side, got nan or inf")
    return B


def _iteration(
    system: System, method: Method, M: LinearOperator | None, tol: float, scale: float | None
) -> Iteration:
    """Return the method with its preconditioner and settings."""
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
        # undo the scaling of the products
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
    """1 / θ for the largest Ritz value θ of A + λ I after a few steps, which is less than 2 / λ_max."""
    op = system.op
    options = {"dtype": op.dtype, "device": op.device, "shard": columns_of(op)}
    start = probes(op.shape[0], 1, seed=0, **options)
    largest = float(lanczos(op, start, STEPS).quadrature()[0].max()) + system.damping
    return 1 / largest if largest > 0 else 1.0


def _least_squares(system: System, solved: Refined, tol: float, used: int) -> tuple[bool, int]:
    """Return True if each unsolved column has ‖Aᵀ r‖ ≤ tol ‖A‖ ‖r‖, as measured; and the products used."""
    slope, residuals = to_numpy(norms(system.transposed(solved.R), dim=0)), to_numpy(norms(solved.R, dim=0))
    return bool(((slope <= tol * solved.size * residuals) | (solved.residual <= tol)).all()), used + 1


GROWN = 1e3  # growth of the residual that means divergence


def neumann_series(
    product: Multiply,
    B: Tensor,
    target: Tensor,
    limit: int,
    precondition: Multiply | None = None,
    *,
    scale: Callable[[], float],
) -> tuple[Tensor, Stop, int]:
    """Terms of the series until ‖r‖ ≤ target (k,): x, why it stopped, products used.

    Args:
        scale: Returns s; called after the first product.
    """
    X, R, used = torch.zeros_like(B), B.clone(), 0
    rest = column_dots(R, R).sqrt()
    first_residual = rest
    for _ in track(range(limit), "Neumann series"):
        grown = ~(rest <= GROWN * first_residual)
        active = (rest > target) & ~grown
        if bool(grown.any()) or not bool(active.any()):
            break
        Z = R.clone() if precondition is None else precondition(R)
        AZ = product(Z)
        used += 1
        step = torch.where(active, scale(), torch.zeros_like(rest))
        rest = torch.where(active, descend(X, R, Z, AZ, step).sqrt(), rest)
    diverged = bool((~(rest <= first_residual)).any())
    reason = "the series diverges: eigenvalues of scale times the operator are not all between 0 and 2"
    return X, Stop(reason if diverged else ""), used


ROUNDS = 10  # largest number of solves, each for the residual of the previous one
GAIN = 0.9  # a round must bring some residual below this multiple of itself


def rescale(x: Tensor, factor: float, other: float, tol: float) -> bool:
    """Multiply x by both factors in place; return True if the result fits x's dtype up to the tolerance."""
    if factor == other == 1.0:
        return True
    smaller, larger = sorted((factor, other))  # the smaller factor first, against overflow
    before = x.clone()
    x.mul_(smaller).mul_(larger)
    back = x.div(larger).div_(smaller)
    finite = holds_on_all_ranks(bool(torch.isfinite(x).all()), x.device)
    return finite and bool(norms(back - before) <= tol * norms(before))


class System:
    """Products with f (A + λ I), where the power of two f scales the first product to about one."""

    def __init__(self, op: LinearOperator, damping: float):
        self.op, self.damping, self.factor = op, damping, 0.0

    def __call__(self, V: Tensor) -> Tensor:
        return self._near_one(self.op @ V, V)

    def transposed(self, U: Tensor) -> Tensor:
        """f (Aᵀ + λ I) U."""
        return self._near_one(self.op.T @ U, U)

    def _near_one(self, product: Tensor, V: Tensor) -> Tensor:
        if self.damping:
            product = torch.add(product, V, alpha=self.damping)
        if self.factor == 0.0:
            self.factor = safe_vector_scale(product)
        return product if self.factor in (0.0, 1.0) else product * self.factor


Iteration = Callable[[Multiply, Tensor, Tensor, int], tuple[Tensor, Stop, int]]


@dataclass(frozen=True)
class Refined:
    """Result of the refinement rounds."""

    X: Tensor  # (n, k)
    R: Tensor  # (m, k) B − A X
    residual: np.ndarray  # (k,) relative
    reason: str
    used: int  # products
    size: float  # size of the operator, from the iteration


def refined(iterate: Iteration, system: System, B: Tensor, tol: float, limit: int) -> Refined:
    """Solve, measure the residual, and solve again for it."""
    sizes = norms(B, dim=0)
    safe = torch.where(sizes > 0, sizes, 1)
    X, R, used = B.new_zeros(system.op.local_shape[1], B.shape[1]), B, 0
    residual, reason, size = to_numpy(sizes / safe), f"stopped at max_products = {limit}", 0.0
    for round_number in range(ROUNDS):
        if (residual <= tol).all() or used + 2 > limit:
            break
        step, stop, spent = iterate(system, R, 0.5 * tol * sizes, limit - used - 1)
        if round_number > 0:
            step.add_(X)
        new_R = torch.empty_like(B)
        new_residual = to_numpy(distance(B, system(step), out=new_R) / safe)
        check_finite(new_residual)
        used, size = used + spent + 1, max(size, stop.size)
        # keep the first x even if its residual is not below that of zero: CG reduces another norm
        better = (new_residual < residual) | (round_number == 0)
        gained = (new_residual < GAIN * residual).any() or used + 2 > limit
        if better.all():
            X, R = step, new_R
        else:
            keep = torch.as_tensor(better).to(B.device)
            X, R = torch.where(keep, step, X), torch.where(keep, new_R, R)
        residual = np.where(better, new_residual, residual)
        if stop.reason or not gained:
            reason = stop.reason or f"rounding keeps the residual above tol = {tol:g}"
            break
    return Refined(X, R, residual, reason, used, size)
