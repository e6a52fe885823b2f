"""Linear systems (A + λ I) x = b with a symmetric A, by products alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.checks import (
    check_choice,
    check_count,
    check_number,
    check_symmetric,
    of_one_matrix,
    relative_tolerance,
)
from curvescope.algorithms.sums import norms, to_numpy
from curvescope.algorithms.systems.iterations import Stop, conjugate_gradients, distance, minimal_residuals
from curvescope.algorithms.vectors import check_finite, comfortable
from curvescope.core.errors import UsageError
from curvescope.core.operator import LinearOperator, as_columns
from curvescope.core.result import Result

Method = Literal["cg", "minres"]
ROUNDS = 10  # solves, each for the residual that the last one left
GAIN = 0.9  # a round must bring some residual below this multiple of itself


@dataclass(frozen=True)
class Solution(Result):
    """Solution of a linear system, with the residual that was measured."""

    x: np.ndarray  # (n,) or (n, k), as the right-hand side
    residual: np.ndarray  # () or (k,): ‖b − (A + λ I) x‖ / ‖b‖, or 0 where b is zero
    converged: bool  # every residual is at most tol
    reason: str  # why it stopped
    num_products: int  # products with one vector
    tol: float
    method: str
    damping: float


@of_one_matrix
def solve(
    op: LinearOperator,
    b: Tensor | np.ndarray,
    *,
    method: Method = "cg",
    damping: float = 0.0,
    tol: float | None = None,
    max_products: int | None = None,
) -> Solution:
    """Solve (A + damping · I) x = b for one right-hand side (n,) or several (n, k), all in lock step.

    Memory, for each right-hand side, besides it and what a product takes: 5 vectors for "cg" and 6 for
    "minres", 2 more after fifty steps or where b may lie outside the range; one more with damping.

    Args:
        method: "cg", conjugate gradients, for positive definite systems: `op` must be declared psd, or
            damped. A direction of no or negative curvature ends that column and is named in `reason`.
            "minres", minimal residuals, for any symmetric operator; where b is not in the range it gives
            a least-squares solution, `converged` false.
        tol: relative residual that counts as converged; 1e-8 in float64, 1e-4 in float32.
        max_products: most products for each right-hand side; min(10 n + 10, 1000) by default.
    """
    check_symmetric(op, "solve")
    check_choice("method", method, get_args(Method))
    damping = check_number("damping", damping, at_least=0.0)
    tol = relative_tolerance(tol, op.dtype)
    B = as_columns(op, b)
    if B.shape[1] == 0:
        raise UsageError("expected at least one right-hand side, got columns of shape (n, 0)")
    if not bool(torch.isfinite(B).all()):
        raise UsageError("expected a finite right-hand side, got nan or inf")
    if method == "cg" and not op.psd and damping == 0:
        raise UsageError(
            f"method='cg' needs an operator declared psd or a damping above 0, got {op!r} with psd=False",
            hint="use method='minres'",
        )
    limit = min(10 * op.shape[0] + 10, 1000)
    if max_products is not None:
        limit = check_count("max_products", max_products, at_least=2)
    iterate = conjugate_gradients if method == "cg" else minimal_residuals
    system, sizes = _System(op, damping), [comfortable(column) or 1.0 for column in B.T]
    if any(size != 1.0 for size in sizes):
        B = B * torch.tensor(sizes, dtype=B.dtype, device=B.device)
    X, residual, reason, used = _refined(iterate, system, B, tol, limit)
    factor = system.factor or 1.0
    fits = [_rescale(x, factor, 1 / size, tol) for x, size in zip(X.T, sizes, strict=True)]
    X, residual = (X[:, 0], residual[0]) if b.ndim == 1 else (X, residual)
    converged = bool(np.all(residual <= tol)) and all(fits)
    if not all(fits):
        reason = f"the solution is outside the range of {op.dtype}: multiply A or b by a number"
    return Solution(
        x=X.cpu().numpy(),
        residual=np.asarray(residual),
        converged=converged,
        reason="converged" if converged else reason,
        num_products=used * B.shape[1],
        tol=tol,
        method=method,
        damping=damping,
    )


def _rescale(x: Tensor, factor: float, other: float, tol: float) -> bool:
    """x · factor · other, in place: whether it can be written down, up to the tolerance, in x's dtype."""
    if factor == other == 1.0:
        return True
    first, second = sorted((factor, other))  # what makes x smaller goes first
    before = x.clone()
    x.mul_(first).mul_(second)
    back = x.div(second).div_(first)
    return bool(torch.isfinite(x).all()) and bool(norms(back - before) <= tol * norms(before))


class _System:
    """Products with f (A + λ I), where f is a power of two that brings the first of them near one."""

    def __init__(self, op: LinearOperator, damping: float):
        self.op, self.damping, self.factor = op, damping, 0.0

    def __call__(self, V: Tensor) -> Tensor:
        product = self.op @ V
        if self.damping:
            product = torch.add(product, V, alpha=self.damping)
        if self.factor == 0.0:
            self.factor = comfortable(product)
        return product if self.factor in (0.0, 1.0) else product * self.factor


def _refined(
    iterate: Callable[..., tuple[Tensor, Stop, int]],
    product: Callable[[Tensor], Tensor],
    B: Tensor,
    tol: float,
    limit: int,
) -> tuple[Tensor, np.ndarray, str, int]:
    """Solve, measure the residual, and solve again for it: x, relative residuals, reason, products used."""
    sizes = norms(B, dim=0)
    safe = torch.where(sizes > 0, sizes, 1)
    X, R, used = torch.zeros_like(B), B, 0
    residual, reason = to_numpy(sizes / safe), f"stopped at max_products = {limit}"
    for turn in range(ROUNDS):
        if (residual <= tol).all() or used + 2 > limit:
            break
        step, stop, spent = iterate(product, R, 0.5 * tol * sizes, limit - used - 1)
        if turn > 0:
            step.add_(X)
        new_R = torch.empty_like(B)
        new_residual = to_numpy(distance(B, product(step), out=new_R) / safe)
        check_finite(new_residual)
        used += spent + 1
        # the first x is kept even if its residual is not below that of zero: CG reduces another norm
        better = (new_residual < residual) | (turn == 0)
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
    return X, residual, reason, used
