"""Conjugate gradients on several right-hand sides in lock step, and functions shared by all iterations.

Each column has its own scalars, in float64; a finished column stays fixed while the others continue. The
number of unfinished columns is read back once per product. Vectors (n, k) are updated in place.

Least squares, min ‖A x − b‖, on several right-hand sides in lock step: LSMR (Fong and Saunders 2011).

It uses Golub and Kahan's bidiagonalization A V = U B, with two plane rotations per step. It equals minimal
residuals for AᵀA x = Aᵀb, without squaring the condition number of A. ‖Aᵀ r‖ never grows.

It stops at ‖Aᵀ r‖ ≤ tol ‖A‖ ‖r‖. The rest of b is then outside the range of A, or along singular vectors with
singular values below tol ‖A‖, which are ignored.

Minimal residuals on several right-hand sides in lock step, with a preconditioner.

With a positive definite M the recurrence is that of Lᵀ A L, M = L Lᵀ, written without L: norms of residuals r
are √(rᵀ M r).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import DotSum, chunks, column_dots, norms
from curvescope.algorithms.vectors import add_multiple, factors
from curvescope.core.errors import UsageError
from curvescope.core.progress import track

FLAT = 10.0  # curvature below so many roundings of the largest one seen counts as zero

Multiply = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Stop:
    """Reason why an iteration ended before its target; empty if it reached it or used all products."""

    reason: str = ""
    size: float = 0.0  # lower bound of the operator's largest singular value, if known


def quotient(a: Tensor, b: Tensor, where: Tensor) -> Tensor:
    """a / b if `where` is True, else zero."""
    return torch.where(where, a / torch.where(where, b, 1), 0)


def distance(B: Tensor, C: Tensor, out: Tensor | None = None) -> Tensor:
    """Norms (k,) of the columns of B − C, which are written to `out` if it is given."""
    squares = DotSum(B)
    for b, c, *r in chunks(B, C, *([] if out is None else [out])):
        squares.add(torch.sub(b, c, out=r[0]) if r else b - c)
    return squares.root()


def weighted_square(R: Tensor, MR: Tensor) -> Tensor:
    """rᵀ M r (k,) of each column; raise if it is negative, because M is then not positive definite."""
    squares = column_dots(R, MR)
    smallest = float(squares.min()) if len(squares) else 0.0
    if smallest < 0 or not bool(torch.isfinite(squares).all()):
        raise UsageError(
            f"expected a positive definite preconditioner, but rᵀ M r = {smallest:.3g} for a residual r",
            hint="M should approximate the inverse of the operator",
        )
    return squares


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
        factor = factors(quotient(new_rho, rho, active), P)
        for p, z in chunks(P, Z):
            p.mul_(factor).add_(z)
        rho = new_rho
    lowest /= getattr(product, "factor", 1.0) or 1.0  # a System multiplies its products by a factor
    reason = (
        f"found a direction of zero or negative curvature, pᵀAp / pᵀp = {lowest:.3g}, so the system is not "
        f"positive definite: raise the damping, by more than {-lowest:.3g}, or use the GGN; minres needs "
        "many products if eigenvalues of both signs are near zero"
    )
    return X, Stop(reason if bool(flat.any()) else ""), used


def descend(X: Tensor, R: Tensor, P: Tensor, AP: Tensor, step: Tensor) -> Tensor:
    """x + step · p and r − step · A p, in place: ‖r‖² (k,)."""
    squares, ahead, back = DotSum(R), factors(step, R), factors(-step, R)
    for x, r, p, ap in chunks(X, R, P, AP):
        add_multiple(x, p, ahead)
        squares.add(add_multiple(r, ap, back))
    return squares.root() ** 2


LEAST_SQUARES = (
    "x is a least-squares solution: the rest of b is not in the range of the operator, or where its singular "
    "values are below tol times the largest"
)


def least_squares(
    product: Multiply, transposed: Multiply, B: Tensor, target: Tensor, tol: float, limit: int
) -> tuple[Tensor, Stop, int]:
    """LSMR from zero until ‖r‖ ≤ target or ‖Aᵀ r‖ ≤ tol ‖A‖ ‖r‖: x, why it stopped, products used.

    Memory: X, U, V and two directions, and a product.
    """
    state, used = _Lsmr(B, transposed(B)), 1
    for _ in track(range((limit - 1) // 2), "least squares"):
        active = (state.residual > target) & ~state.least(tol) & ~state.done
        if not bool(active.any()):
            break
        state.advance(product, transposed, active)
        used += 2
    stopped = (state.residual > target) & (state.least(tol) | state.done)
    return state.X, Stop(LEAST_SQUARES if bool(stopped.any()) else "", float(state.scale.max())), used


class _Lsmr:
    """State of the recurrence; names follow the paper, with a bar or a tilde spelled out."""

    def __init__(self, B: Tensor, AtB: Tensor):
        beta, alpha_beta = norms(B, dim=0).double(), norms(AtB, dim=0).double()
        alpha = quotient(alpha_beta, beta, beta > 0)
        one, zero = torch.ones_like(beta), torch.zeros_like(beta)
        self.U, self.V = B * _inverse(beta, B), AtB * _inverse(alpha_beta, AtB)
        self.X, self.H, self.H_bar = torch.zeros_like(AtB), self.V.clone(), torch.zeros_like(AtB)
        self.alpha, self.alpha_bar, self.scale = alpha, alpha, alpha
        self.zeta_bar, self.zeta = alpha_beta, zero
        self.rho, self.rho_bar, self.cos_bar, self.sin_bar = one, one, one, zero
        # for ‖r‖
        self.beta_dd, self.beta_d, self.rho_d, self.tau_tilde, self.theta_tilde = beta, zero, one, zero, zero
        self.residual, self.slope = beta, alpha_beta
        self.done = alpha_beta == 0  # b is orthogonal to the range, or x is exact

    def least(self, tol: float) -> Tensor:
        """Return True if ‖Aᵀ r‖ ≤ tol ‖A‖ ‖r‖, for each column."""
        return self.slope <= tol * self.scale * self.residual

    def advance(self, product: Multiply, transposed: Multiply, active: Tensor) -> None:
        """Take one step in the active columns; the others stay fixed."""
        rounding = FLAT * torch.finfo(self.U.dtype).eps
        beta = _continue(self.U, product(self.V), self.alpha)
        beta = torch.where(beta > rounding * self.scale, beta, 0)
        self.U.mul_(_inverse(beta, self.U))
        alpha = _continue(self.V, transposed(self.U), beta)
        self.scale = torch.maximum(self.scale, torch.hypot(alpha, beta))
        alpha = torch.where(alpha > rounding * self.scale, alpha, 0)
        self.V.mul_(_inverse(alpha, self.V))
        self._rotate(alpha, beta, active)

    def _rotate(self, alpha: Tensor, beta: Tensor, active: Tensor) -> None:
        rho_before, rho_bar_before, zeta_before = self.rho, self.rho_bar, self.zeta
        rho = torch.hypot(self.alpha_bar, beta)
        cos, sin = quotient(self.alpha_bar, rho, rho > 0), quotient(beta, rho, rho > 0)
        theta, self.alpha_bar = sin * alpha, cos * alpha
        theta_bar, middle = self.sin_bar * rho, self.cos_bar * rho
        rho_bar = torch.hypot(middle, theta)
        safe = active & (rho > 0) & (rho_bar > 0)
        self.cos_bar, self.sin_bar = quotient(middle, rho_bar, safe), quotient(theta, rho_bar, safe)
        zeta = self.cos_bar * self.zeta_bar
        self._step(
            back=-quotient(theta_bar * rho, rho_before * rho_bar_before, safe),
            ahead=quotient(zeta, rho * rho_bar, safe),
            turn=-quotient(theta, rho, safe),
        )
        new_slope = (self.sin_bar * self.zeta_bar).abs()
        self.slope = torch.where(safe, new_slope, self.slope)
        self.zeta_bar = torch.where(safe, -self.sin_bar * self.zeta_bar, self.zeta_bar)
        self.rho, self.rho_bar, self.zeta = rho, rho_bar, zeta
        self._measure(cos, sin, theta_bar, zeta_before, safe)
        self.alpha, self.done = alpha, self.done | (active & ~safe) | (safe & (new_slope == 0))

    def _step(self, *, back: Tensor, ahead: Tensor, turn: Tensor) -> None:
        """h̄ = h + back · h̄, x + ahead · h̄, and h = v + turn · h."""
        b, a, t = (factors(c, self.X) for c in (back, ahead, turn))
        for x, v, h, h_bar in chunks(self.X, self.V, self.H, self.H_bar):
            h_bar.mul_(b).add_(h)
            add_multiple(x, h_bar, a)
            h.mul_(t).add_(v)

    def _measure(
        self, cos: Tensor, sin: Tensor, theta_bar: Tensor, zeta_before: Tensor, safe: Tensor
    ) -> None:
        """‖r‖ of this step, from a second set of rotations (section 5.1 of the paper)."""
        beta_hat, self.beta_dd = cos * self.beta_dd, -sin * self.beta_dd
        theta_before, rho_tilde = self.theta_tilde, torch.hypot(self.rho_d, theta_bar)
        cos_tilde = quotient(self.rho_d, rho_tilde, rho_tilde > 0)
        sin_tilde = quotient(theta_bar, rho_tilde, rho_tilde > 0)
        self.theta_tilde, self.rho_d = sin_tilde * self.rho_bar, cos_tilde * self.rho_bar
        self.beta_d = -sin_tilde * self.beta_d + cos_tilde * beta_hat
        top = zeta_before - theta_before * self.tau_tilde
        self.tau_tilde = quotient(top, rho_tilde, rho_tilde > 0)
        tau_d = quotient(self.zeta - self.theta_tilde * self.tau_tilde, self.rho_d, self.rho_d != 0)
        self.residual = torch.where(safe, torch.hypot(self.beta_d - tau_d, self.beta_dd), self.residual)


def _inverse(length: Tensor, like: Tensor) -> Tensor:
    """1 / length for each column, or zero."""
    return quotient(torch.ones_like(length), length, length > 0).to(like.dtype)


def _continue(before: Tensor, product: Tensor, c: Tensor) -> Tensor:
    """Overwrite `before` by product − c · before; return its norm (k,)."""
    squares, back = DotSum(before), factors(-c, before)
    for x, y in chunks(before, product):
        squares.add(x.mul_(back).add_(y))
    return squares.root()


NULL = 3.0  # in square roots of a rounding: a smaller ‖A r‖ / (‖A‖ ‖r‖) may be rounding
CHECKED = 50  # steps between two measurements of the true residual
DRIFT = 3.0  # largest ratio of the true residual to the recurrence's


def minimal_residuals(
    product: Multiply, B: Tensor, target: Tensor, limit: int, precondition: Multiply | None = None
) -> tuple[Tensor, Stop, int]:
    """MINRES (Paige and Saunders 1975) from zero until ‖r‖ ≤ target (k,): x, why it stopped, products used.

    A column whose residual cannot be reduced ends at its least-squares solution. Rounding makes x drift from
    the recurrence, so the true residual is measured regularly. The iteration ends if they disagree, with the
    better of the last two measured x. Memory: five times B and a product; one more after fifty steps, and one
    where b may lie outside the range; two with a preconditioner.
    """
    state, used = _Minres(B, precondition), 0
    if precondition is not None:  # the same reduction in the norm of the recurrence
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
    rounding, grows again and x with it: the column is stuck, and returns to the x with the least ‖A r‖.

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
        self.best_X: Tensor | None = None  # None stands for zero
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
        """Overwrite u_before by A v − α u − β u_before; return its norm (k,)."""
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
        """Return a mask (k,) of stuck columns, given ‖A r‖ / ‖r‖ of their current residuals. An x is stored
        only if its slope is nearly zero.
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
