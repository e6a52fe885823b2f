"""Least squares, min ‖A x − b‖, on several right-hand sides in lock step: LSMR (Fong and Saunders 2011).

Golub and Kahan's bidiagonalization A V = U B, with two plane rotations for each step: what minimal residuals
do for AᵀA x = Aᵀb, without squaring the condition of A. ‖Aᵀ r‖ never grows.

It stops at ‖Aᵀ r‖ ≤ tol ‖A‖ ‖r‖, where what is left of b is outside the range of A, or along singular vectors
whose singular values are below tol ‖A‖: these are cut off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvescope.algorithms.sums import DotSum, chunks, norms
from curvescope.algorithms.systems.iterations import FLAT, Multiply, Stop, quotient
from curvescope.algorithms.vectors import add_multiple, factors
from curvescope.core.progress import track

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
        self.done = alpha_beta == 0  # nothing of b is in the range, or it is all found

    def least(self, tol: float) -> Tensor:
        """Whether ‖Aᵀ r‖ ≤ tol ‖A‖ ‖r‖, for each column."""
        return self.slope <= tol * self.scale * self.residual

    def advance(self, product: Multiply, transposed: Multiply, active: Tensor) -> None:
        """One step in the active columns; the others stay as they are."""
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
    """product − c · before in the place of `before`: its norm (k,)."""
    squares, back = DotSum(before), factors(-c, before)
    for x, y in chunks(before, product):
        squares.add(x.mul_(back).add_(y))
    return squares.root()
