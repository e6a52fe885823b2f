"""Conjugate gradients on several right-hand sides in lock step, and what the iterations share.

Each column has its own scalars, in float64; one that is done stays as it is while the others go on. Whether
any is left is read back once for each product. Vectors (n, k) are updated in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.algorithms.sums import DotSum, chunks, column_dots
from curvescope.algorithms.vectors import add_multiple, factors
from curvescope.core.errors import UsageError
from curvescope.core.progress import track

FLAT = 10.0  # roundings: curvature below this many, relative to the largest seen, is none

Multiply = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Stop:
    """Why an iteration ended before its target; empty if it reached it or its products were used up."""

    reason: str = ""
    size: float = 0.0  # of the operator, where it is known: no more than its largest singular value


def quotient(a: Tensor, b: Tensor, where: Tensor) -> Tensor:
    """a / b where allowed, else zero."""
    return torch.where(where, a / torch.where(where, b, 1), 0)


def distance(B: Tensor, C: Tensor, out: Tensor | None = None) -> Tensor:
    """Norms (k,) of the columns of B − C, which are written to `out` if it is given."""
    squares = DotSum(B)
    for b, c, *r in chunks(B, C, *([] if out is None else [out])):
        squares.add(torch.sub(b, c, out=r[0]) if r else b - c)
    return squares.root()


def weighted_square(R: Tensor, MR: Tensor) -> Tensor:
    """rᵀ M r (k,) of each column; an error where it is negative, so that M is not positive definite."""
    found = column_dots(R, MR)
    least = float(found.min()) if len(found) else 0.0
    if least < 0 or not bool(torch.isfinite(found).all()):
        raise UsageError(
            f"expected a positive definite preconditioner, but rᵀ M r = {least:.3g} for a residual r",
            hint="M is to be near the inverse of the operator",
        )
    return found


def conjugate_gradients(
    product: Multiply, B: Tensor, target: Tensor, limit: int, precondition: Multiply | None = None
) -> tuple[Tensor, Stop, int]:
    """Conjugate gradients from zero until ‖r‖ ≤ target (k,): x, why it stopped, products used.

    A direction p with pᵀ A p not above rounding ends its column. Memory: X, R, P and a product; with a
    preconditioner, M R too.
    """
    eps = torch.finfo(B.dtype).eps
    X, R = torch.zeros_like(B), B.clone()
    Z = R if precondition is None else precondition(R)
    P, squares = Z.clone(), column_dots(R, R)
    rho = squares if precondition is None else weighted_square(R, Z)
    steepest = torch.zeros_like(rho)
    flat = torch.zeros_like(rho, dtype=torch.bool)
    lowest = 0.0
    used = 0
    for _ in track(range(limit), "conjugate gradients"):
        active = (squares.sqrt() > target) & ~flat
        if not bool(active.any()):
            break
        AP, length = product(P), column_dots(P, P)
        used += 1
        curvature = quotient(column_dots(P, AP), length, length > 0)
        steepest = torch.maximum(steepest, curvature.abs())
        flat |= active & ~(curvature > FLAT * eps * steepest)
        lowest = min(lowest, float(torch.where(active, curvature, 0).min()))
        active = active & ~flat
        step = quotient(rho, curvature * length, active)
        squares = torch.where(active, descend(X, R, P, AP, step), squares)
        Z = R if precondition is None else precondition(R)
        new_rho = squares if precondition is None else torch.where(active, weighted_square(R, Z), rho)
        turn = factors(quotient(new_rho, rho, active), P)
        for p, z in chunks(P, Z):
            p.mul_(turn).add_(z)
        rho = new_rho
    lowest /= getattr(product, "factor", 1.0) or 1.0  # a System multiplies its products by a factor
    reason = (
        f"met a direction of zero or negative curvature, pᵀAp / pᵀp = {lowest:.3g}, so the system is not "
        f"positive definite: raise the damping, by more than {-lowest:.3g}, or use the GGN; minres needs "
        "many products where eigenvalues of both signs are near zero"
    )
    return X, Stop(reason if bool(flat.any()) else ""), used


def descend(X: Tensor, R: Tensor, P: Tensor, AP: Tensor, step: Tensor) -> Tensor:
    """x + step · p and r − step · A p, in place: ‖r‖² (k,)."""
    squares, ahead, back = DotSum(R), factors(step, R), factors(-step, R)
    for x, r, p, ap in chunks(X, R, P, AP):
        add_multiple(x, p, ahead)
        squares.add(add_multiple(r, ap, back))
    return squares.root() ** 2
