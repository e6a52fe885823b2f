"""The mean loss as a function of the sample size: exact laws, and the bounds of petrov2025.

L_k(w) = (1/k) Σ_{i ≤ k} l_i(w), so that L_{k+1} − L_k = (l_{k+1} − L_k)/(k + 1) for any numbers l_i.
Samples are drawn independently, or without replacement from N of them; then variances and covariances have
the divisor N − 1 and the same laws are exact for every k < N. At a point w* + δ, δ ~ N(0, s² I), a sample's
loss is approximated by l_x + g_xᵀδ + ½ δᵀH_xδ in the laws that mention the quadratic model.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from curvescope.core.errors import UsageError

Numbers = float | np.ndarray


def mean_square_increment(variance: Numbers, k: Numbers) -> Numbers:
    """E(L_{k+1} − L_k)² = Var_x l / (k (k + 1)), at one point, for any model."""
    return variance / (k * (k + 1))


class ThreeTerms(NamedTuple):
    """E_δ Var_x l_x(w* + δ) of the quadratic model; k(k + 1) E(L_{k+1} − L_k)² is their sum."""

    loss: float  # Var_x(l + ½ s² tr H)
    gradient: float  # s² tr Cov_x(g)
    hessian: float  # ½ s⁴ E‖H_x − H̄‖_F²

    @property
    def total(self) -> float:
        """Sum of the three terms."""
        return self.loss + self.gradient + self.hessian


def three_terms(
    s: float,
    *,
    loss_variance: float,
    loss_trace_covariance: float,
    trace_variance: float,
    gradient_covariance: float,
    fluctuation: float,
) -> ThreeTerms:
    """Return the three terms for a probe of radius s.

    Var(l + ½ s² t) = Var l + s² Cov(l, t) + ¼ s⁴ Var t with t = tr H_x;
    E(gᵀδ)² and E(δᵀAδ)² − (E δᵀAδ)² of δ ~ N(0, s² I) are s²‖g‖² and 2 s⁴‖A‖_F².

    Args:
        s: Standard deviation of every entry of δ.
        loss_variance: Var_x l.
        loss_trace_covariance: Cov_x(l, tr H_x).
        trace_variance: Var_x tr H_x.
        gradient_covariance: tr Cov_x g.
        fluctuation: E_x‖H_x − H̄‖_F².
    """
    return ThreeTerms(
        loss_variance + s**2 * loss_trace_covariance + s**4 * trace_variance / 4,
        s**2 * gradient_covariance,
        s**4 * fluctuation / 2,
    )


def gradient_mean_square(covariance: Numbers, mean: Numbers, k: Numbers, N: int) -> Numbers:
    """E‖∇L_k‖² = ‖ḡ‖² + (tr Cov g / k) (N − k)/(N − 1), k of N samples without replacement.

    Args:
        covariance: tr Cov of the samples' gradients, with the divisor N.
        mean: ‖ḡ‖² of all N samples; zero at their minimizer.
        k: Number of samples drawn.
        N: Number of all samples.
    """
    return mean + covariance / k * (N - k) / (N - 1)


def increment_bound(loss: Numbers, M: Numbers, distance: Numbers, k: Numbers) -> Numbers:
    """(2 L + M r²)/(k + 1), which Theorem 7 of petrov2025 prints as a bound of |L_{k+1}(w) − L_k(w)|.

    With M = max ‖H_i(w*)‖ it is false. It is a bound if 0 ≤ l_i, l_i(w*) ≤ L and every l_i is M-smooth on the
    ball around w* of radius max(r, √(2L/M)): ‖∇l_i(w*)‖² ≤ 2 M L, so that l_i(w) ≤ 2 L + M r².

    Args:
        loss: L, a bound of the samples' losses at w*.
        M: A bound of the spectral norms of their Hessians.
        distance: r = ‖w − w*‖.
        k: Number of samples.
    """
    return (2 * loss + M * distance**2) / (k + 1)


def quadratic_mean_square(a: Numbers, c: np.ndarray, B: np.ndarray, sigma: float) -> Numbers:
    """Δ₂ = E(a + cᵀz + ½ zᵀBz)² = (a + ½ σ² tr B)² + σ²‖c‖² + ½ σ⁴‖B‖_F², z ~ N(0, σ² I_D).

    Args:
        a: (…,) L_{k+1} − L_k.
        c: (…, D) the same difference of gradients, in an orthonormal basis of a subspace.
        B: (…, D, D) the same difference of Hessians, symmetric.
        sigma: σ.
    """
    trace = np.trace(B, axis1=-2, axis2=-1)
    return (a + sigma**2 * trace / 2) ** 2 + sigma**2 * (c**2).sum(-1) + sigma**4 * (B**2).sum((-2, -1)) / 2


def quadratic_bound(
    loss: float, gradient: float, hessian: float, sigma: float, D: int, k: Numbers
) -> Numbers:
    """(12 M_l² + 3 σ² M_g² + 3 σ⁴ (D² + 2D) M_H²)/(k + 1)², a bound of Δ₂ (arXiv 2604.14870).

    Args:
        loss: M_l ≥ |l_i|.
        gradient: M_g with ‖g_{k+1} − ∇L_k‖ ≤ M_g in the subspace.
        hessian: M_H with ‖H_{k+1} − ∇²L_k‖ ≤ 2 M_H in the subspace.
        sigma: σ.
        D: Dimension of the subspace.
        k: Number of samples.
    """
    top = 12 * loss**2 + 3 * sigma**2 * gradient**2 + 3 * sigma**4 * (D**2 + 2 * D) * hessian**2
    return top / (k + 1) ** 2


def samples_for(variance: float, tolerance: float) -> int:
    """Return the least k with E(L_{k+1} − L_k)² ≤ tolerance²: k(k + 1) ≥ Var/τ², so k ≈ √Var/τ."""
    if tolerance <= 0:
        raise UsageError(f"expected a tolerance above 0, got {tolerance}")
    ratio = variance / tolerance**2
    k = max(1, math.ceil((math.sqrt(1 + 4 * ratio) - 1) / 2 - 1e-9))
    return k if k * (k + 1) >= ratio * (1 - 1e-12) else k + 1
