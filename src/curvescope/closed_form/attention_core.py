"""Attention as a function of queries, keys and values: O = A v, A = ψ(s q kᵀ + bias).

ψ is the softmax over keys, or the identity (linear attention). One set of formulas covers both through
(A, a, τ, τ₂, η): with ρ = G vᵀ for a cotangent G of O, softmax has a = A, τ₂ = τ and η = 1, linear attention
a = mask, τ₂ = 0 and η = 0; τ = a ∘ (ρ − η Σ_j a ρ) is the cotangent of the scores. Leading axes are
batches and heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from curvescope.core.errors import UsageError

AttentionKind = Literal["softmax", "linear"]
Triple = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, or tangents or cotangents of them."""


@dataclass(frozen=True)
class CorePoint:
    """Attention at given queries, keys and values. Make one with `core_point`."""

    q: Tensor  # (…, T, k)
    k: Tensor  # (…, T, k)
    v: Tensor  # (…, T, w)
    A: Tensor  # (…, T, T)
    density: Tensor  # a: (…, T, T)
    scale: float
    centred: bool  # η = 1

    @property
    def output(self) -> Tensor:
        """O = A v: (…, T, w)."""
        return self.A @ self.v

    def weigh(self, u: Tensor) -> Tensor:
        """a ∘ (u − η Σ_j a u): the derivative of A along scores u; symmetric as a map."""
        centre = _sum(self.density * u) if self.centred else 0.0
        return self.density * (u - centre)

    def score_cotangent(self, G: Tensor) -> Tensor:
        """τ = ∂⟨G, O⟩/∂(s q kᵀ): (…, T, T)."""
        return self.weigh(G @ self.v.mT)

    def mean(self, f: Tensor) -> Tensor:
        """η a f: what is subtracted from a key feature, (…, T, width)."""
        return self.density @ f if self.centred else torch.zeros_like(self.density @ f)


def core_point(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    kind: AttentionKind = "softmax",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> CorePoint:
    """Attention with scores s q kᵀ + bias; `mask` (True: seen) hides keys. A row without keys gives 0."""
    if kind not in get_args(AttentionKind):
        raise UsageError(f"expected an attention of {', '.join(get_args(AttentionKind))}, got {kind!r}")
    scores = scale * q @ k.mT
    scores = scores if bias is None else scores + bias
    seen = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand(scores.shape)
    if kind == "linear":
        return CorePoint(q, k, v, scores * seen, seen.to(q.dtype), scale, False)
    A = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)
    return CorePoint(q, k, v, A, A, scale, True)


def core_jvp(at: CorePoint, d: Triple) -> Tensor:
    """dO = dA v + A dv, dA = a ∘ (dt − η Σ a dt), dt = s (dq kᵀ + q dkᵀ)."""
    return at.weigh(_score_tangent(at, d)) @ at.v + at.A @ d[2]


def core_vjp(at: CorePoint, G: Tensor) -> Triple:
    """Cotangents s τ k, s τᵀ q and Aᵀ G of queries, keys and values."""
    tau = at.score_cotangent(G)
    return at.scale * tau @ at.k, at.scale * tau.mT @ at.q, at.A.mT @ G


def core_curve(at: CorePoint, G: Tensor, d: Triple) -> Triple:
    """∇²⟨G, O⟩ applied to tangents (dq, dk, dv), in a few T × T matrices."""
    dt, tau = _score_tangent(at, d), at.score_cotangent(G)
    dtau = at.weigh(G @ d[2].mT)
    if at.centred:
        dtau = dtau + tau * (dt - _sum(at.density * dt)) - at.density * _sum(tau * dt)
    h_q = at.scale * (dtau @ at.k + tau @ d[1])
    h_k = at.scale * (dtau.mT @ at.q + tau.mT @ d[0])
    return h_q, h_k, at.weigh(dt).mT @ G


def core_jacobian(at: CorePoint) -> Tensor:
    """∂O/∂(q, k, v) in this order: (…, T w, T (2k + w)).

    ∂O_iv/∂q_ic = s Σ_j a_ij ṽ_ij,v k_jc; ∂O_iv/∂k_jc = s a_ij ṽ_ij,v q_ic; ∂O_iv/∂v_jw = A_ij δ_vw, where
    ṽ_ij = v_j − η (a v)_i.
    """
    I_T, I_w = _eye(at.q.shape[-2], at.q), _eye(at.v.shape[-1], at.v)
    spread = at.v[..., None, :, :] - at.mean(at.v)[..., :, None, :]  # (…, i, j, v)
    weighted = at.scale * at.density[..., None] * spread
    to_q = torch.einsum("...ijv,...jc,il->...ivlc", weighted, at.k, I_T)
    to_k = torch.einsum("...ijv,...ic->...ivjc", weighted, at.q)
    to_v = torch.einsum("...ij,vw->...ivjw", at.A, I_w)
    rows = at.v.shape[-2] * at.v.shape[-1]
    lead = at.q.shape[:-2]
    return torch.cat([J.reshape(*lead, rows, -1) for J in (to_q, to_k, to_v)], dim=-1)


def core_curvature(at: CorePoint, G: Tensor) -> Tensor:
    """∇²⟨G, O⟩ over (q, k, v), dense: (…, n, n) with n = T (2k + w).

    With k̃_ij = k_j − k̄_i and Ψ_i = diag τ_i − τ_i a_iᵀ − a_i τ_iᵀ (0 for linear attention):
    qq[i c, i e] = s² Σ_jl Ψ_i,jl k_jc k_le; qk[i c, j e] = s² Σ_l Ψ_i,jl k_lc q_ie + s τ_ij δ_ce;
    kk[j c, l e] = s² Σ_i Ψ_i,jl q_ic q_ie; qv[i c, j w] = s a_ij k̃_ij,c G_iw;
    kv[l c, j w] = s Σ_i q_ic (a_ij δ_jl − η a_ij a_il) G_iw; vv = 0.
    """
    s, tau, a = at.scale, at.score_cotangent(G), at.density
    T = at.q.shape[-2]
    I_T, I_k = _eye(T, at.q), _eye(at.q.shape[-1], at.q)
    psi = torch.zeros(*at.A.shape, T).to(at.A)
    slope = torch.diag_embed(a)  # ∂A_i/∂t_i: (…, i, j, l)
    if at.centred:
        cross = tau[..., :, None] * a[..., None, :]
        psi = torch.diag_embed(tau) - cross - cross.mT
        slope = slope - a[..., :, None] * a[..., None, :]
    qq = s**2 * torch.einsum("...ijl,...jc,...le,im->...icme", psi, at.k, at.k, I_T)
    qk = s**2 * torch.einsum("...ijl,...lc,...ie->...icje", psi, at.k, at.q)
    qk = qk + s * torch.einsum("...ij,ce->...icje", tau, I_k)
    kk = s**2 * torch.einsum("...ijl,...ic,...ie->...jcle", psi, at.q, at.q)
    qv = s * torch.einsum("...ijl,...lc,...iw->...icjw", slope, at.k, G)
    kv = s * torch.einsum("...ijl,...ic,...iw->...lcjw", slope, at.q, G)
    lead, n, m = at.q.shape[:-2], at.q.shape[-2] * at.q.shape[-1], at.v.shape[-2] * at.v.shape[-1]
    qq, qk, kk = (block.reshape(*lead, n, n) for block in (qq, qk, kk))
    qv, kv = (block.reshape(*lead, n, m) for block in (qv, kv))
    vv = torch.zeros(*lead, m, m).to(qq)
    rows = [[qq, qk, qv], [qk.mT, kk, kv], [qv.mT, kv.mT, vv]]
    return torch.cat([torch.cat(row, dim=-1) for row in rows], dim=-2)


def _score_tangent(at: CorePoint, d: Triple) -> Tensor:
    """dt = s (dq kᵀ + q dkᵀ)."""
    return at.scale * (d[0] @ at.k.mT + at.q @ d[1].mT)


def _sum(u: Tensor) -> Tensor:
    return u.sum(-1, keepdim=True)


def _eye(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=like.dtype, device=like.device)
