"""How far an approximation A is from a matrix B: as a matrix, and as a preconditioner.

    frobenius    ‖A − B‖ / ‖B‖
    angle        arccos of ⟨A, B⟩ / (‖A‖ ‖B‖), in degrees; up to 90° its sine is min over s of ‖s A − B‖ / ‖B‖
    divergence   log(tr M / n) − log det(M) / n for M = (A + α I)⁻¹ (B + β I): how unequal the eigenvalues of
                 the preconditioned matrix are, 0 where they are all alike
    lost         1 − (gᵀd)² / (dᵀ C d · gᵀ C⁻¹ g), d = (A + α I)⁻¹ g, C = B + β I: the part of the decrease
                 of the quadratic model that the best step along d does not reach

with α and β the same multiple of each matrix's own mean diagonal. All but the first do not see the scale of
A. The last two need a positive B, so the Hessian has the first two alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.studies.factors.matrices import Blocked

MEASURES = ("frobenius", "angle", "divergence", "lost", "frobenius_hessian", "angle_hessian")
"""The first four from the GGN, the last two from the Hessian."""


class Target(NamedTuple):
    """A positive matrix B, B + β I, and the Cholesky factor of that."""

    matrix: Tensor
    damped: Tensor
    root: Tensor


def target(B: Tensor, damping: float) -> Target:
    """B with β = damping · tr B / n."""
    C = B + damping * B.diagonal().mean() * torch.eye(len(B), dtype=B.dtype, device=B.device)
    return Target(B, C, torch.linalg.cholesky(C))


def distances(A: Blocked, G: Target, H: Tensor, g: Tensor, damping: float) -> np.ndarray:
    """All MEASURES of A beside the GGN and the Hessian, at the gradient g: (6,)."""
    factors = roots(A, damping)
    found = [frobenius(A, G.matrix), angle(A, G.matrix)]
    found += [divergence(A.slices, factors, G), lost(A.slices, factors, G, g)]
    return np.array([*found, frobenius(A, H), angle(A, H)])


def frobenius(A: Blocked, B: Tensor) -> float:
    """‖A − B‖ / ‖B‖."""
    rest = B.clone()
    for place, part in zip(*A, strict=True):
        rest[place, place] -= part
    return float(rest.norm() / B.norm())


def angle(A: Blocked, B: Tensor) -> float:
    """arccos of ⟨A, B⟩ / (‖A‖ ‖B‖), in degrees."""
    size = math.sqrt(sum(float(part.square().sum()) for part in A.parts)) * float(B.norm())
    cosine = sum(float((B[s, s] * part).sum()) for s, part in zip(*A, strict=True)) / size
    return math.degrees(math.acos(min(1.0, max(-1.0, cosine))))


def divergence(slices: list[slice], factors: list[Tensor], B: Target) -> float:
    """log of the arithmetic over the geometric mean of the eigenvalues of (A + α)⁻¹ (B + β)."""
    trace, n = 0.0, len(B.matrix)
    for place, root in zip(slices, factors, strict=True):
        trace += float(torch.cholesky_solve(B.damped[place, place], root).trace())
    own, theirs = (sum(_logdet(root) for root in some) for some in ([B.root], factors))
    return max(0.0, math.log(trace / n) - (own - theirs) / n)


def _logdet(root: Tensor) -> float:
    """log det of L Lᵀ."""
    return 2 * float(root.diagonal().log().sum())


def lost(slices: list[slice], factors: list[Tensor], B: Target, g: Tensor) -> float:
    """The part of the optimal decrease of gᵀx + xᵀ C x / 2 that no step along (A + α)⁻¹ g reaches."""
    d = direction(slices, factors, g)
    best = g @ torch.cholesky_solve(g[:, None], B.root)[:, 0]
    return max(0.0, 1 - float((g @ d) ** 2 / ((d @ B.damped @ d) * best)))


def between(B: Tensor, slices: list[slice]) -> float:
    """The share of ‖B‖² that lies outside its diagonal blocks."""
    return 1 - sum(float(B[s, s].square().sum()) for s in slices) / float(B.square().sum())


def roots(A: Blocked, damping: float) -> list[Tensor]:
    """Cholesky factors of every block of A + α I, α = damping · tr A / n over all blocks."""
    alpha = damping * A.mean_diagonal
    return [
        torch.linalg.cholesky(part + alpha * torch.eye(len(part), dtype=part.dtype, device=part.device))
        for part in A.parts
    ]


def direction(slices: list[slice], factors: list[Tensor], g: Tensor) -> Tensor:
    """(A + α I)⁻¹ g from the factors of its blocks."""
    d = torch.empty_like(g)
    for place, root in zip(slices, factors, strict=True):
        d[place] = torch.cholesky_solve(g[place, None], root)[:, 0]
    return d
