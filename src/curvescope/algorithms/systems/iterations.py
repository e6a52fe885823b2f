"""Conjugate gradients and minimal residuals on several right-hand sides in lock step.

Each column has its own scalars, in float64; one that is done stays as it is while the others go on. Whether
any is left is read back once for each product. Vectors (n, k) are updated in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.algorithms.sums import DotSum, chunks, column_dots, norms
from curvescope.algorithms.vectors import add_multiple, factors
from curvescope.core.progress import track

FLAT = 10.0  # roundings: curvature below this many, relative to the largest seen, is none

NULL = 3.0  # square roots of a rounding: below, ‖A r‖ / (‖A‖ ‖r‖) may be all that rounding allows
CHECKED = 50  # steps of MINRES between two looks at the true residual
DRIFT = 3.0  # how far it may be above what the recurrence says


@dataclass(frozen=True)
class Stop:
    """Why an iteration ended before its target; empty if it reached it or its products were used up."""

    reason: str = ""


def _quotient(a: Tensor, b: Tensor, where: Tensor) -> Tensor:
    """a / b where allowed, else zero."""
    return torch.where(where, a / torch.where(where, b, 1), 0)


def distance(B: Tensor, C: Tensor, out: Tensor | None = None) -> Tensor:
    """Norms (k,) of the columns of B − C, which are written to `out` if it is given."""
    squares = DotSum(B)
    for b, c, *r in chunks(B, C, *([] if out is None else [out])):
        squares.add(torch.sub(b, c, out=r[0]) if r else b - c)
    return squares.root()


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], B: Tensor, target: Tensor, limit: int
) -> tuple[Tensor, Stop, int]:
    """Conjugate gradients from zero until ‖r‖ ≤ target (k,): x, why it stopped, products used.

    A direction p with pᵀ A p not above rounding ends its column. Memory: X, R, P and a product.
    """
    eps = torch.finfo(B.dtype).eps
    X, R, P = torch.zeros_like(B), B.clone(), B.clone()
    rho = column_dots(R, R)
    steepest = torch.zeros_like(rho)
    flat = torch.zeros_like(rho, dtype=torch.bool)
    used = 0
    for _ in track(range(limit), "conjugate gradients"):
        active = (rho.sqrt() > target) & ~flat
        if not bool(active.any()):
            break
        AP, length = product(P), column_dots(P, P)
        used += 1
        curvature = _quotient(column_dots(P, AP), length, length > 0)
        steepest = torch.maximum(steepest, curvature.abs())
        flat |= active & ~(curvature > FLAT * eps * steepest)
        active = active & ~flat
        step = _quotient(rho, curvature * length, active)
        new_rho = torch.where(active, _descend(X, R, P, AP, step), rho)
        turn = factors(_quotient(new_rho, rho, active), P)
        for p, r in chunks(P, R):
            p.mul_(turn).add_(r)
        rho = new_rho
    reason = "met a direction of zero or negative curvature: the system is not positive definite, use minres"
    return X, Stop(reason if bool(flat.any()) else ""), used


def _descend(X: Tensor, R: Tensor, P: Tensor, AP: Tensor, step: Tensor) -> Tensor:
    """x + step · p and r − step · A p, in place: ‖r‖² (k,)."""
    squares, ahead, back = DotSum(R), factors(step, R), factors(-step, R)
    for x, r, p, ap in chunks(X, R, P, AP):
        add_multiple(x, p, ahead)
        squares.add(add_multiple(r, ap, back))
    return squares.root() ** 2


def minimal_residuals(
    product: Callable[[Tensor], Tensor], B: Tensor, target: Tensor, limit: int
) -> tuple[Tensor, Stop, int]:
    """MINRES (Paige and Saunders 1975) from zero until ‖r‖ ≤ target (k,): x, why it stopped, products used.

    A column whose residual cannot be reduced ends at its least-squares solution. Rounding lets x drift away
    from what the recurrence says of it, so the true residual is measured now and then; the iteration ends
    where they disagree, with the better of the last two x measured. Memory: five times B and a product; one
    more after fifty steps, and one where b may lie outside the range.
    """
    state, used = _Minres(B), 0
    checked, checked_rest = None, state.tau
    for step in track(range(limit), "minimal residuals"):
        active = (state.tau.abs() > target) & ~state.stuck
        if not bool(active.any()) or used >= limit:
            break
        state.advance(product(state.V), active)
        used += 1
        if step % CHECKED == CHECKED - 1 and used < limit:
            rest = distance(B, product(state.X))
            used += 1
            drifted = ~(rest <= DRIFT * torch.maximum(state.tau.abs(), target))
            if bool(drifted.any()):
                state.X = torch.where(rest < checked_rest, state.X, 0 if checked is None else checked)
                break
            checked_rest = rest
            checked = state.X.clone() if checked is None else checked.copy_(state.X)
    reason = (
        "up to rounding, the rest of b is not in the range of the operator: x is a least-squares solution"
    )
    return state.X, Stop(reason if bool(state.stuck.any()) else ""), used


class _Minres:
    """State of the MINRES recurrence for columns (n, k).

    Lanczos gives a tridiagonal T; plane rotations make it upper triangular, with three entries ε, δ, γ in
    each column. |τ| is the norm of the residual r. For b outside the range, A r goes to zero and then, by
    rounding, grows again and x with it: the column is stuck, and goes back to the x with the least ‖A r‖.
    """

    def __init__(self, B: Tensor):
        self.X, self.tau = torch.zeros_like(B), norms(B, dim=0).double()
        self.V = B / torch.where(self.tau > 0, self.tau, 1).to(B.dtype)
        self.V_before = torch.zeros_like(B)
        self.W, self.W_before = torch.zeros_like(B), torch.zeros_like(B)  # search directions
        zero, one = torch.zeros_like(self.tau), torch.ones_like(self.tau)
        self.beta, self.scale, self.stuck = zero, zero, torch.zeros_like(zero, dtype=torch.bool)
        self.cos, self.sin, self.cos_before, self.sin_before = one, zero, one, zero
        self.best_X: Tensor | None = None  # zero until there is a better one
        self.best_slope, self.best_tau = one * torch.inf, self.tau

    def advance(self, AV: Tensor, active: Tensor) -> None:
        """Take one step in the active columns, given A V."""
        dtype, rounding = AV.dtype, FLAT * torch.finfo(AV.dtype).eps
        alpha = column_dots(self.V, AV)
        beta = self._lanczos_step(AV, alpha)
        self.scale = torch.maximum(self.scale, alpha.abs() + self.beta + beta)
        # the last two rotations, applied to the new column of T
        epsilon, middle = self.sin_before * self.beta, self.cos_before * self.beta
        delta, corner = self.cos * middle + self.sin * alpha, self.cos * alpha - self.sin * middle
        # ‖A r‖ / ‖r‖ of the residual before this step is the norm of (corner, cos β)
        active = active & ~self._judge(torch.hypot(corner, self.cos * beta), active, dtype)
        gamma = torch.hypot(corner, beta)
        self.cos_before, self.sin_before = self.cos, self.sin
        self.cos, self.sin = _quotient(corner, gamma, active), _quotient(beta, gamma, active)
        shrink = _quotient(torch.ones_like(gamma), gamma, active)
        length = _quotient(torch.ones_like(beta), beta, beta > rounding * self.scale)
        self._update(epsilon, delta, shrink, torch.where(active, self.cos * self.tau, 0), length)
        self.tau = torch.where(active, -self.sin * self.tau, self.tau)
        self.beta = beta

    def _lanczos_step(self, AV: Tensor, alpha: Tensor) -> Tensor:
        """A v − α v − β v_before in the place of v_before: its norm (k,)."""
        squares, back, down = DotSum(AV), factors(-self.beta, AV), factors(-alpha, AV)
        for before, v, av in chunks(self.V_before, self.V, AV):
            squares.add(add_multiple(before.mul_(back).add_(av), v, down))
        return squares.root()

    def _update(self, epsilon: Tensor, delta: Tensor, shrink: Tensor, step: Tensor, length: Tensor) -> None:
        """The next direction (v − ε w_before − δ w) · shrink, a step along it, and the next v, in one go."""
        e, d, s, t, one = (factors(c, self.X) for c in (-epsilon, -delta, shrink, step, length))
        for x, v, rest, w, direction in chunks(self.X, self.V, self.V_before, self.W, self.W_before):
            add_multiple(direction.mul_(e).add_(v), w, d).mul_(s)
            add_multiple(x, direction, t)
            rest.mul_(one)
        self.W_before, self.W = self.W, self.W_before
        self.V_before, self.V = self.V, self.V_before

    def _judge(self, slope: Tensor, active: Tensor, dtype: torch.dtype) -> Tensor:
        """Columns (k,) that are stuck, given ‖A r‖ / ‖r‖ of their present residuals.

        An x is only remembered where its slope is near what would count as none.
        """
        eps = torch.finfo(dtype).eps
        near = slope <= 10 * NULL * eps**0.5 * self.scale
        better = active & near & (slope * self.tau.abs() < self.best_slope * self.best_tau.abs())
        for c in better.nonzero()[:, 0].tolist():
            self.best_X = torch.zeros_like(self.X) if self.best_X is None else self.best_X
            self.best_X[:, c] = self.X[:, c]
        self.best_slope = torch.where(better, slope, self.best_slope)
        self.best_tau = torch.where(better, self.tau, self.best_tau)
        null = slope <= FLAT * eps * self.scale
        small = self.best_slope <= NULL * eps**0.5 * self.scale
        grown = (slope > 100 * self.best_slope) & (self.tau.abs() > 0.9 * self.best_tau.abs())
        stuck = active & (null | (small & grown))
        for c in stuck.nonzero()[:, 0].tolist():
            self.X[:, c] = 0 if self.best_X is None else self.best_X[:, c]
        self.stuck = self.stuck | stuck
        return stuck
