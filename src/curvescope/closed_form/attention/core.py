"""Attention as a function of queries, keys and values: O = A v, A = ψ(s q kᵀ + bias).

ψ is the softmax over keys, or the identity (linear attention). One set of formulas covers both through the
density a and a number η: softmax has a = A and η = 1, linear attention a = mask and η = 0. For a cotangent G
of O and ρ = G vᵀ, τ = a ∘ (ρ − η Σ_j a ρ) is the cotangent of the scores. Leading axes are batches and
heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from curvescope.closed_form.softmax import centered, deviations, masked_softmax
from curvescope.core.errors import UsageError

AttentionKind = Literal["softmax", "linear"]
Triple = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, or tangents or cotangents of them."""


@dataclass(frozen=True)
class CorePoint:
    """Attention at given queries, keys and values. `core_point` makes it."""

    q: Tensor  # (…, T, k)
    k: Tensor  # (…, T, k)
    v: Tensor  # (…, T, w)
    A: Tensor  # (…, T, T)
    density: Tensor  # a: (…, T, T)
    scale: float
    centered: bool  # η = 1

    @property
    def output(self) -> Tensor:
        """O = A v: (…, T, w)."""
        return self.A @ self.v

    def center(self, u: Tensor) -> Tensor:
        """u − η Σ_j a u for scores u (…, T, T)."""
        return centered(self.density, u) if self.centered else u

    def weigh(self, u: Tensor) -> Tensor:
        """a ∘ (u − η Σ_j a u): the derivative of A along scores u; symmetric as a map."""
        return self.density * self.center(u)

    def score_cotangent(self, G: Tensor) -> Tensor:
        """τ = ∂⟨G, O⟩/∂(s q kᵀ): (…, T, T)."""
        return self.weigh(G @ self.v.mT)

    def spread(self, f: Tensor) -> Tensor:
        """f̃_ij = f_j − η Σ_l a_il f_l for a feature f (…, T, width) of the keys: (…, T, T, width)."""
        return deviations(self.A, f) if self.centered else f[..., None, :, :].expand(*self.A.shape, -1)


@dataclass(frozen=True)
class CoreTangent:
    """Change of attention along tangents of queries, keys and values. `core_push` makes it."""

    d: Triple
    dt: Tensor  # of the scores, centered under a if η = 1: (…, T, T)
    dA: Tensor  # (…, T, T)
    dO: Tensor  # (…, T, w)


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
    """Attention with scores s q kᵀ + bias; `mask` is True for visible keys. Rows without keys are 0."""
    if kind not in get_args(AttentionKind):
        raise UsageError(f"expected an attention of {', '.join(get_args(AttentionKind))}, got {kind!r}")
    scores = scale * q @ k.mT
    scores = scores if bias is None else scores + bias
    if kind == "linear":
        allowed = torch.ones_like(scores) if mask is None else mask.expand(scores.shape).to(scores)
        return CorePoint(q, k, v, scores * allowed, allowed, scale, False)
    A = masked_softmax(scores, mask)
    return CorePoint(q, k, v, A, A, scale, True)


def core_push(at: CorePoint, d: Triple) -> CoreTangent:
    """dO = dA v + A dv, dA = a ∘ (dt − η Σ a dt), dt = s (dq kᵀ + q dkᵀ)."""
    dt = at.center(at.scale * (d[0] @ at.k.mT + at.q @ d[1].mT))
    dA = at.density * dt
    return CoreTangent(d, dt, dA, dA @ at.v + at.A @ d[2])


def core_vjp(at: CorePoint, G: Tensor) -> Triple:
    """Cotangents s τ k, s τᵀ q and Aᵀ G of queries, keys and values."""
    tau = at.score_cotangent(G)
    return at.scale * tau @ at.k, at.scale * tau.mT @ at.q, at.A.mT @ G


def core_curve(at: CorePoint, G: Tensor, tangent: CoreTangent, dG: Tensor | None = None) -> Triple:
    """Change of `core_vjp(at, G)` along tangents (dq, dk, dv) and a change dG of G.

    Without dG that is ∇²⟨G, O⟩ (dq, dk, dv): dτ = a ∘ (dρ − η Σ a dρ) + η (τ ∘ dt − a Σ τ dt), where
    dρ = G dvᵀ + dG vᵀ. A few T × T matrices.
    """
    (dq, dk, dv), tau = tangent.d, at.score_cotangent(G)
    d_rho, h_v = G @ dv.mT, tangent.dA.mT @ G
    if dG is not None:
        d_rho, h_v = d_rho + dG @ at.v.mT, h_v + at.A.mT @ dG
    dtau = at.weigh(d_rho)
    if at.centered:
        weighted = tau * tangent.dt
        dtau = dtau + weighted - at.density * weighted.sum(-1, keepdim=True)
    return at.scale * (dtau @ at.k + tau @ dk), at.scale * (dtau.mT @ at.q + tau.mT @ dq), h_v


def core_jacobian(at: CorePoint) -> Tensor:
    """∂O/∂(q, k, v) in this order: (…, T w, T (2k + w)).

    ∂O_iv/∂q_ic = s Σ_j a_ij ṽ_ij,v k_jc; ∂O_iv/∂k_jc = s a_ij ṽ_ij,v q_ic; ∂O_iv/∂v_jw = A_ij δ_vw, where
    ṽ_ij = v_j − η (a v)_i.
    """
    I_T, I_w = torch.eye(at.q.shape[-2]).to(at.q), torch.eye(at.v.shape[-1]).to(at.v)
    weighted = at.scale * at.density[..., None] * at.spread(at.v)  # (…, i, j, v)
    to_q = torch.einsum("...ijv,...jc,il->...ivlc", weighted, at.k, I_T)
    to_k = torch.einsum("...ijv,...ic->...ivjc", weighted, at.q)
    to_v = torch.einsum("...ij,vw->...ivjw", at.A, I_w)
    rows = at.v.shape[-2] * at.v.shape[-1]
    lead = at.q.shape[:-2]
    return torch.cat([J.reshape(*lead, rows, -1) for J in (to_q, to_k, to_v)], dim=-1)


def core_curvature(at: CorePoint, G: Tensor) -> Tensor:
    """∇²⟨G, O⟩ over (q, k, v), dense: (…, n, n) with n = T (2k + w).

    With k̃_ij = k_j − η (a k)_i and Ψ_i = diag τ_i − τ_i a_iᵀ − a_i τ_iᵀ (0 for linear attention):
    qq[i c, i e] = s² Σ_jl Ψ_i,jl k̃_ij,c k̃_il,e; qk[i c, j e] = s² Σ_l Ψ_i,jl k̃_il,c q_ie + s τ_ij δ_ce;
    kk[j c, l e] = s² Σ_i Ψ_i,jl q_ic q_ie; qv[i c, j w] = s a_ij k̃_ij,c G_iw;
    kv[l c, j w] = s Σ_i q_ic (a_ij δ_jl − η a_ij a_il) G_iw; vv = 0.
    """
    s, tau, a = at.scale, at.score_cotangent(G), at.density
    T = at.q.shape[-2]
    I_T, I_k, k = torch.eye(T).to(at.q), torch.eye(at.q.shape[-1]).to(at.q), at.spread(at.k)
    psi = torch.zeros(*at.A.shape, T).to(at.A)
    slope = torch.diag_embed(a)  # ∂A_i/∂t_i: (…, i, j, l)
    if at.centered:
        cross = tau[..., :, None] * a[..., None, :]
        psi = torch.diag_embed(tau) - cross - cross.mT
        slope = slope - a[..., :, None] * a[..., None, :]
    qq = s**2 * torch.einsum("...ijl,...ijc,...ile,im->...icme", psi, k, k, I_T)
    qk = s**2 * torch.einsum("...ijl,...ilc,...ie->...icje", psi, k, at.q)
    qk = qk + s * torch.einsum("...ij,ce->...icje", tau, I_k)
    kk = s**2 * torch.einsum("...ijl,...ic,...ie->...jcle", psi, at.q, at.q)
    qv = s * torch.einsum("...ij,...ijc,...iw->...icjw", a, k, G)
    kv = s * torch.einsum("...ijl,...ic,...iw->...lcjw", slope, at.q, G)
    lead, n, m = at.q.shape[:-2], at.q.shape[-2] * at.q.shape[-1], at.v.shape[-2] * at.v.shape[-1]
    qq, qk, kk = (block.reshape(*lead, n, n) for block in (qq, qk, kk))
    qv, kv = (block.reshape(*lead, n, m) for block in (qv, kv))
    vv = torch.zeros(*lead, m, m).to(qq)
    rows = [[qq, qk, qv], [qk.mT, kk, kv], [qv.mT, kv.mT, vv]]
    return torch.cat([torch.cat(row, dim=-1) for row in rows], dim=-2)


def merge_heads(u: Tensor) -> Tensor:
    """Reshape (B, h, T, k) to (B, T, h k)."""
    return u.transpose(1, 2).flatten(2)
