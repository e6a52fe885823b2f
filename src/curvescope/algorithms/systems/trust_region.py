"""Minimum of a quadratic within a ball, by conjugate gradients that stop at its boundary.

    min over ‖d‖ ≤ Δ of q(d) = gᵀd + ½ dᵀBd,        B symmetric, of any sign

Conjugate gradients from d = 0 have growing ‖d‖ and falling q, so that the first iterate outside of the ball,
or the first direction p with pᵀBp ≤ 0, along which q is unbounded below, determines where to cross the
boundary (Steihaug, 1983; Nocedal & Wright, 2006, algorithm 7.2). q(d) is at most its minimum along −g, and
equals the minimum over the ball if conjugate gradients converge inside.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from curvescope.algorithms.accurate_sums import gram
from curvescope.algorithms.checks import check_count, check_symmetric, fixed_operator
from curvescope.algorithms.vectors import check_finite
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.operator import LinearOperator

End = Literal["converged", "boundary", "negative curvature", "limit"]


class TrustStep(NamedTuple):
    """Step, its predicted change of the quadratic, and the reason why the iteration ended."""

    step: Tensor  # (n,)
    change: float  # q(step), at most zero
    curvature: float  # stepᵀ B step
    num_products: int
    end: End

    @property
    def at_boundary(self) -> bool:
        """Return True if ‖step‖ = Δ."""
        return self.end in ("boundary", "negative curvature")


@fixed_operator
def trust_step(
    op: LinearOperator,
    gradient: Tensor,
    radius: float,
    *,
    tolerance: float = 1e-6,
    num_products: int | None = None,
) -> TrustStep:
    """Steihaug's conjugate gradients; one product for every iteration, six vectors in memory.

    Args:
        op: B, symmetric.
        gradient: g, (n,).
        radius: Δ, above 0; `math.inf` if B is positive definite.
        tolerance: Converged when ‖g + Bd‖ ≤ tolerance · ‖g‖.
        num_products: Largest number of iterations, by default n.
    """
    check_symmetric(op, "trust_step")
    if gradient.shape != (op.shape[0],):
        raise ShapeError(f"expected a gradient of {op.shape[0]} entries, got {tuple(gradient.shape)}")
    if not radius > 0:
        raise UsageError(f"expected a radius above 0, got {radius!r}")
    limit = check_count("num_products", op.shape[0] if num_products is None else num_products, at_least=1)
    norm = _norm(gradient)
    if not norm:
        return TrustStep(torch.zeros_like(gradient), 0.0, 0.0, 0, "converged")
    g = gradient / norm  # r and p are in units of ‖g‖, so that no product overflows
    d, r, p = torch.zeros_like(g), g.clone(), -g
    for k in range(limit):
        Bp = op @ p
        bent, square = _dot(p, Bp), _dot(r, r)
        check_finite(bent, square)
        ahead = square / bent if bent > 0 else math.inf
        edge = to_boundary(d, p, radius) / norm
        if ahead >= edge:
            if math.isinf(edge):
                raise UsageError(
                    f"the quadratic has no minimum: pᵀBp = {bent * norm**2:.3g}",
                    hint="pass a finite radius",
                )
            d, r = d + edge * norm * p, r + edge * Bp
            return _trust_step(norm, g, d, r, k + 1, "boundary" if bent > 0 else "negative curvature")
        d, r = d + ahead * norm * p, r + ahead * Bp
        if _norm(r) <= tolerance:
            return _trust_step(norm, g, d, r, k + 1, "converged")
        p = p * (_dot(r, r) / square) - r
    return _trust_step(norm, g, d, r, limit, "limit")


def to_boundary(d: Tensor, p: Tensor, radius: float) -> float:
    """τ ≥ 0 with ‖d + τ p‖ = radius, for d inside the ball."""
    if math.isinf(radius):
        return math.inf
    a, b, c = _dot(p, p), _dot(d, p), _dot(d, d) - radius**2
    root = math.sqrt(max(b * b - a * c, 0.0))
    return -c / (b + root) if b > 0 else (root - b) / a  # the form without cancellation


def _trust_step(norm: float, g: Tensor, d: Tensor, r: Tensor, count: int, end: End) -> TrustStep:
    """Return the step from r = g + Bd in units of the norm: q(d) = ½ (g + r)ᵀd, dᵀBd = (r − g)ᵀd."""
    along, rest = norm * _dot(g, d), norm * _dot(r, d)
    return TrustStep(d, (along + rest) / 2, rest - along, count, end)


def _dot(a: Tensor, b: Tensor) -> float:
    """aᵀb in float64: products of float32 entries leave its range beyond 1e±19."""
    return float(gram(a[None], b[None])[0, 0])


def _norm(a: Tensor) -> float:
    return math.sqrt(_dot(a, a))
