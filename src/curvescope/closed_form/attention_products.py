"""The Hessian of an attention layer times a direction, from scratch: no moments, no blocks.

One forward pass with tangents, then one backward pass for each part. With scores t, A = softmax(t) and
τ = ∂⟨G, F⟩/∂t, a direction moves dt, dA = A (dt − ⟨dt⟩_A) and dF; the outer part pulls B dF back, the
functional part differentiates the pull-back of a fixed G,

    dτ = τ (dt − ⟨dt⟩_A) − A Σ_j τ dt + A (dρ − ⟨dρ⟩_A),   ρ = G vᵀ,

⟨·⟩_A being the mean under a query's attention weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.closed_form.attention_layer import ROLE, AttentionLayer


@dataclass(frozen=True)
class Tangent:
    """How everything moves along a direction; all (n, h, ·, ·) but `dF` (n, L, o)."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dt: Tensor  # centred under A if softmax
    dA: Tensor
    dF: Tensor
    d_out: Tensor
    dG: Tensor | None  # of ∂⟨G, F⟩/∂ heads' outputs, as W_O moves


def product(
    layer: AttentionLayer, directions: Mapping[str, Tensor], *, part: str = "total"
) -> dict[str, Tensor]:
    """H times a direction, JᵀBJ times it, or (ΣG∂²F) times it: matrices by name, for every weight."""
    tangent = _push(layer, directions)
    zero = torch.zeros_like
    hq, hk, hv = zero(layer.q), zero(layer.k), zero(layer.v)
    outputs = {name: zero(W) for name, W in layer.weights.items() if ROLE[name] == "O"}
    if part in ("outer", "total"):
        U = layer.curve_loss(tangent.dF[..., None])[..., 0]
        oq, ok, ov = _pull(layer, U)
        hq, hk, hv = hq + oq, hk + ok, hv + ov
        if "O" in outputs:
            outputs["O"] = outputs["O"] + _merge(layer.heads_out).flatten(0, 1).T @ U.flatten(0, 1)
        if "b_O" in outputs:
            outputs["b_O"] = U.sum((0, 1))[None]
    if part in ("functional", "total"):
        fq, fk, fv = _turn(layer, tangent)
        hq, hk, hv = hq + fq, hk + fk, hv + fv
        if "O" in outputs:
            outputs["O"] = outputs["O"] + _merge(tangent.d_out).flatten(0, 1).T @ layer.G.flatten(0, 1)
    return _collect(layer, hq, hk, hv) | outputs


def _push(layer: AttentionLayer, directions: Mapping[str, Tensor]) -> Tangent:
    """Tangents of scores, weights and outputs."""
    moved = {role: layer.project(role, directions) for role in "QKV"}
    dq = torch.zeros_like(layer.q) if moved["Q"] is None else layer.rotate_queries(moved["Q"])
    dk = torch.zeros_like(layer.k) if moved["K"] is None else layer.rotate_keys(moved["K"])
    dv = torch.zeros_like(layer.v) if moved["V"] is None else moved["V"]
    dt = layer.centre(layer.scale * (dq @ layer.k.mT + layer.q @ dk.mT))
    dA = layer.slope * dt
    d_out = dA @ layer.v + layer.A @ dv
    W_O, dW_O, db_O = layer.weights.get("O"), directions.get("O"), directions.get("b_O")
    dF = d_out[:, 0] if W_O is None else _merge(d_out) @ W_O
    if dW_O is not None:
        dF = dF + _merge(layer.heads_out) @ dW_O
    if db_O is not None:
        dF = dF + db_O
    dG = None if dW_O is None else layer.pull_output(layer.G, dW_O)
    return Tangent(dq, dk, dv, dt, dA, dF, d_out, dG)


def _pull(layer: AttentionLayer, U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of rotated queries, rotated keys and values from one of F."""
    U = layer.pull_output(U, layer.weights.get("O"))
    tau = layer.slope * layer.centre(U @ layer.v.mT)
    return layer.scale * tau @ layer.k, layer.scale * tau.mT @ layer.q, layer.A.mT @ U


def _turn(layer: AttentionLayer, tangent: Tangent) -> tuple[Tensor, Tensor, Tensor]:
    """How the cotangents of a fixed G change along the direction."""
    G, tau = layer.G_heads, layer.tau
    d_rho = G @ tangent.dv.mT
    dv = tangent.dA.mT @ G
    if tangent.dG is not None:
        d_rho = d_rho + tangent.dG @ layer.v.mT
        dv = dv + layer.A.mT @ tangent.dG
    d_tau = layer.slope * layer.centre(d_rho)
    if layer.kind == "softmax":
        d_tau = d_tau + tau * tangent.dt - layer.A * (tau * tangent.dt).sum(-1, keepdim=True)
    dq = layer.scale * (d_tau @ layer.k + tau @ tangent.dk)
    dk = layer.scale * (d_tau.mT @ layer.q + tau.mT @ tangent.dq)
    return dq, dk, dv


def _collect(layer: AttentionLayer, hq: Tensor, hk: Tensor, hv: Tensor) -> dict[str, Tensor]:
    """featureᵀ · cotangent for each weight, heads that share keys and values added."""
    share = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
    found = {}
    for name in layer.weights:
        if ROLE[name] == "O":
            continue
        if ROLE[name] == "Q":
            cotangent = layer.rotate_queries(hq, back=True)
        else:
            full = layer.rotate_keys(hk, back=True) if ROLE[name] == "K" else hv
            cotangent = full.unflatten(1, share).sum(2)
        found[name] = layer.feature(name).flatten(0, 1).T @ _merge(cotangent).flatten(0, 1)
    return found


def _merge(heads: Tensor) -> Tensor:
    """(n, h, T, c) as (n, T, h c)."""
    return heads.transpose(1, 2).flatten(2)
