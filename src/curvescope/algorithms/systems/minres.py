"""Minimal residuals on several right-hand sides in lock step, with a preconditioner.

With a positive definite M the recurrence is that of Lᵀ A L, M = L Lᵀ, written without L: norms of residuals r
are √(rᵀ M r).
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvescope.algorithms.sums import DotSum, chunks, column_dots, norms
from curvescope.algorithms.systems.iterations import (
    FLAT,
    Multiply,
    Stop,
    distance,
    quotient,
    weighted_square,
)
from curvescope.algorithms.vectors import add_multiple, factors
from curvescope.core.progress import track

NULL = 3.0  # square roots of a rounding: below, ‖A r‖ / (‖A‖ ‖r‖) may be all that rounding allows
CHECKED = 50  # steps between two looks at the true residual
DRIFT = 3.0  # how far it may be above what the recurrence says


def minimal_residuals(
    product: Multiply, B: Tensor, target: Tensor, limit: int, precondition: Multiply | None = None
) -> tuple[Tensor, Stop, int]:
    """MINRES (Paige and Saunders 1975) from zero until ‖r‖ ≤ target (k,): x, why it stopped, products used.

    A column whose residual cannot be reduced ends at its least-squares solution. Rounding lets x drift away
    from what the recurrence says of it, so the true residual is measured now and then; the iteration ends
    where they disagree, with the better of the last two x measured. Memory: five times B and a product; one
    more after fifty steps, and one where b may lie outside the range; two with a preconditioner.
    """
    state, used = _Minres(B, precondition), 0
    if precondition is not None:  # the same reduction, of the norm that the recurrence has
        sizes = norms(B, dim=0).double()
        target = quotient(target * state.tau, sizes, sizes > 0)
    checked, checked_rest = None, state.tau
    for step in track(range(limit), "minimal residuals"):
        active = (state.tau.abs() > target) & ~state.stuck
        if not bool(active.any()) or used >= limit:
            break
        state.advance(product(state.V), active)
        used += 1
        if step % CHECKED == CHECKED - 1 and used < limit:
            rest = _rest(B, product(state.X), precondition)
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


def _rest(B: Tensor, AX: Tensor, precondition: Multiply | None) -> Tensor:
    """Norms (k,) of the residuals B − A X."""
    if precondition is None:
        return distance(B, AX)
    R = B - AX
    return weighted_square(R, precondition(R)).sqrt()


class _Minres:
    """State of the MINRES recurrence for columns (n, k).

    Lanczos gives a tridiagonal T; plane rotations make it upper triangular, with three entries ε, δ, γ in
    each column. |τ| is the norm of the residual r. For b outside the range, A r goes to zero and then, by
    rounding, grows again and x with it: the column is stuck, and goes back to the x with the least ‖A r‖.

    U are the vectors of Lanczos and V = M U those that products are taken with; without M they are the same.
    """

    def __init__(self, B: Tensor, precondition: Multiply | None):
        self.precondition = precondition
        V = B if precondition is None else precondition(B)
        self.X = torch.zeros_like(B)
        self.tau = norms(B, dim=0).double() if precondition is None else weighted_square(B, V).sqrt()
        size = torch.where(self.tau > 0, self.tau, 1).to(B.dtype)
        self.U, self.U_before = B / size, torch.zeros_like(B)
        self.V = self.U if precondition is None else V / size
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
        self.cos, self.sin = quotient(corner, gamma, active), quotient(beta, gamma, active)
        shrink = quotient(torch.ones_like(gamma), gamma, active)
        length = quotient(torch.ones_like(beta), beta, beta > rounding * self.scale)
        self._update(epsilon, delta, shrink, torch.where(active, self.cos * self.tau, 0), length)
        self.tau = torch.where(active, -self.sin * self.tau, self.tau)
        self.beta = beta

    def _lanczos_step(self, AV: Tensor, alpha: Tensor) -> Tensor:
        """A v − α u − β u_before in the place of u_before: its norm (k,)."""
        squares, back, down = DotSum(AV), factors(-self.beta, AV), factors(-alpha, AV)
        for before, u, av in chunks(self.U_before, self.U, AV):
            squares.add(add_multiple(before.mul_(back).add_(av), u, down))
        if self.precondition is None:
            return squares.root()
        self.next_V = self.precondition(self.U_before)
        return weighted_square(self.U_before, self.next_V).sqrt()

    def _update(self, epsilon: Tensor, delta: Tensor, shrink: Tensor, step: Tensor, length: Tensor) -> None:
        """The next direction (v − ε w_before − δ w) · shrink, a step along it, and the next v, in one go."""
        e, d, s, t, one = (factors(c, self.X) for c in (-epsilon, -delta, shrink, step, length))
        for x, v, rest, w, direction in chunks(self.X, self.V, self.U_before, self.W, self.W_before):
            add_multiple(direction.mul_(e).add_(v), w, d).mul_(s)
            add_multiple(x, direction, t)
            rest.mul_(one)
        self.W_before, self.W = self.W, self.W_before
        self.U_before, self.U = self.U, self.U_before
        self.V = self.U if self.precondition is None else self.next_V * one

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
