"""Softmax: its derivatives up to the third, and the moments of tokens under its weights.

At p = softmax(z) the Jacobian diag(p) − p pᵀ maps u to p ∘ (u − Σ p u). The code subtracts the most probable
entry of u before the mean. Small variances then keep their digits, even if p is concentrated or all entries
of u share a large part.

Attention moments: mean, covariance and third central moment of the tokens under each query's weights.

    M₁,i = Σ_j A_ij x_j,   M₂,i = Σ_j A_ij x̃ x̃ᵀ,   M₃,i = Σ_j A_ij x̃ ⊗ x̃ ⊗ x̃,   x̃ = x_j − M₁,i.

The Hessian of softmax attention depends on the data through these moments (Ormaniec et al. 2025, section 3).
They are the derivatives of log Σ_j exp(x_j · u) at the query's u.

Third derivatives of the softmax are joint cumulants.

p = ∇ logsumexp, so its derivatives are joint cumulants of the directions under p. With ũ = u − Σ p u, ⟨·⟩ the
mean under p,

    D²p[u,v]   = p ∘ (ũṽ − ⟨ũṽ⟩)
    D³p[u,v,w] = p ∘ (ũṽw̃ − ⟨ũṽw̃⟩ − ũ⟨ṽw̃⟩ − ṽ⟨ũw̃⟩ − w̃⟨ũṽ⟩).

Every contraction costs O(V) per row; only the functions that end in `_tensor` form an array of all entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError


def masked_softmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the softmax over entries of the last axis with a true `mask`; a row of only −∞ gives zeros."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    blind = torch.isneginf(scores).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)


def centered(p: Tensor, u: Tensor) -> Tensor:
    """Return u − Σ p u over the last axis, for probabilities p (…, V) and u (…, V); other axes broadcast."""
    if p.shape[-1:] != u.shape[-1:]:
        raise ShapeError(f"expected directions over {p.shape[-1]} entries, got {tuple(u.shape)}")
    shape = torch.broadcast_shapes(p.shape, u.shape)
    top = p.argmax(-1, keepdim=True).expand(*shape[:-1], 1)
    u = u.expand(shape)
    u = u - u.gather(-1, top)
    return u - (p * u).sum(-1, keepdim=True)


def softmax_along(p: Tensor, u: Tensor) -> Tensor:
    """Dp[u] = (diag(p) − p pᵀ) u = p ∘ (u − Σ p u): (…, V). Symmetric, so Jᵀ u too."""
    return p * centered(p, u)


def softmax_covariance(p: Tensor, U: Tensor) -> Tensor:
    """U (diag(p) − p pᵀ) Uᵀ = Σ_v p_v ũ_v ũ_vᵀ for the columns of U (o, V) under p (…, V): (…, o, o)."""
    deviation = centered(p[..., None, :], U)
    return (deviation * p[..., None, :]) @ deviation.mT


@dataclass(frozen=True)
class AttentionMoments:
    """The first three moments, one of each per query."""

    M1: Tensor  # (…, L, d)
    M2: Tensor  # (…, L, d, d), symmetric
    M3: Tensor  # (…, L, d, d, d), symmetric in its last three axes


def attention_moments(A: Tensor, X: Tensor) -> AttentionMoments:
    """Return the moments of tokens X (…, S, d) under attention weights A (…, L, S); other axes broadcast.

    Rows of A are distributions; a row of zeros (a query that sees no token) has zero moments. Moments keep
    their digits for concentrated rows, because the most attended token is subtracted first.
    """
    deviation = deviations(A, X)
    weighted = A[..., None] * deviation
    M2 = weighted.mT @ deviation
    M3 = torch.einsum("...ija,...ijb,...ijc->...iabc", weighted, deviation, deviation)
    return AttentionMoments(A @ X, M2, M3)


def third_moment_along(A: Tensor, X: Tensor, U: Tensor) -> Tensor:
    """M₃,i contracted with one vector per query, Σ_j A_ij (x̃ · u_i) x̃ x̃ᵀ: (…, L, d, d), no d³ array.

    U is (…, L, d).
    """
    deviation = deviations(A, X)
    weight = A * (deviation @ U[..., None])[..., 0]
    return (weight[..., None] * deviation).mT @ deviation


def deviations(A: Tensor, X: Tensor) -> Tensor:
    """x̃_ij = x_j − Σ_l A_il x_l, (…, L, S, d)."""
    _check(A, X)
    return centered(A[..., :, None, :], X.mT[..., None, :, :]).mT


def _check(A: Tensor, X: Tensor) -> None:
    if A.dim() < 2 or X.dim() < 2 or A.shape[-1] != X.shape[-2]:
        raise ShapeError(
            f"expected weights (…, L, S) and tokens (…, S, d), got {tuple(A.shape)} and {tuple(X.shape)}"
        )
    total = A.sum(-1)
    slack = torch.finfo(A.dtype).eps ** 0.5
    if bool(((total - 1).abs().minimum(total.abs()) > slack).any()) or bool((A < 0).any()):
        raise UsageError(
            "expected every row of A to be non-negative and to sum to one, or to be zero",
            hint="the moments are defined for softmax attention only",
        )


@dataclass(frozen=True)
class Cumulants:
    """Cumulants of a direction u under p = softmax(z): the derivatives of logsumexp at z along u."""

    mean: Tensor  # (…)
    variance: Tensor
    third: Tensor  # ⟨ũ³⟩
    fourth: Tensor  # ⟨ũ⁴⟩ − 3⟨ũ²⟩²


def cumulants(p: Tensor, u: Tensor) -> Cumulants:
    """κ₁ … κ₄ of u (…, V) under probabilities p (…, V).

    From the second on they are also the derivatives along u of the cross-entropy ℓ = logsumexp(z) − z_y.
    """
    du = centered(p, u)
    second, third, fourth = ((p * du**k).sum(-1) for k in (2, 3, 4))
    return Cumulants((p * u).sum(-1), second, third, fourth - 3 * second**2)


def logsumexp_third(p: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """D³ logsumexp[u,v,w] = ⟨ũṽw̃⟩, the third joint cumulant: (…)."""
    return (p * centered(p, u) * centered(p, v) * centered(p, w)).sum(-1)


def logsumexp_fourth(p: Tensor, u: Tensor, v: Tensor, w: Tensor, q: Tensor) -> Tensor:
    """D⁴ logsumexp[u,v,w,q] = ⟨ũṽw̃q̃⟩ − ⟨ũṽ⟩⟨w̃q̃⟩ − ⟨ũw̃⟩⟨ṽq̃⟩ − ⟨ũq̃⟩⟨ṽw̃⟩: (…)."""
    return (softmax_third_along(p, u, v, w) * centered(p, q)).sum(-1)


def softmax_second_along(p: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """D²softmax[u,v]: (…, V). With a cotangent g, ∇²⟨g, softmax⟩ u is D²softmax[u,g]."""
    return softmax_along(p, centered(p, u) * centered(p, v))


def softmax_third_along(p: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """D³softmax[u,v,w]: (…, V). With a cotangent g, ∇³⟨g, softmax⟩[u,v,·] is D³softmax[u,v,g]."""
    u, v, w = centered(p, u), centered(p, v), centered(p, w)
    pairs = u * _mean(p, v * w) + v * _mean(p, u * w) + w * _mean(p, u * v)
    return softmax_along(p, u * v * w) - p * pairs


def logsumexp_third_tensor(p: Tensor) -> Tensor:
    """D³ logsumexp, which is D²softmax, as an array symmetric in its indices: (…, V, V, V)."""
    basis = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    return softmax_second_along(p[..., None, None, :], basis[:, None], basis)


def softmax_third_tensor(p: Tensor) -> Tensor:
    """D³softmax, which is D⁴ logsumexp, as an array symmetric in its indices: (…, V, V, V, V)."""
    basis = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    return softmax_third_along(p[..., None, None, None, :], basis[:, None, None], basis[:, None], basis)


def _mean(p: Tensor, u: Tensor) -> Tensor:
    return (p * u).sum(-1, keepdim=True)
