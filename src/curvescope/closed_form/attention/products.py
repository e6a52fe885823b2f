"""The Hessian of an attention layer times a direction, from scratch: no moments, no blocks.

One forward pass with tangents, then one backward pass: H_o pulls B dF back, the functional Hessian
differentiates the pull-back of a fixed G. What happens between queries, keys, values and the heads' outputs
is in `core`; here are the projections around it, with rotations and shared heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvescope.closed_form.attention.core import (
    CorePoint,
    Triple,
    core_curve,
    core_push,
    core_vjp,
    merge_heads,
)
from curvescope.closed_form.attention.layer import ROLE, AttentionLayer
from curvescope.core.parts import check_part


def product(
    layer: AttentionLayer, directions: Mapping[str, Tensor], *, part: str = "total"
) -> dict[str, Tensor]:
    """H times a direction, JᵀBJ times it, or (ΣG∂²F) times it: matrices by name, for every weight."""
    check_part(part)
    at = CorePoint(layer.q, layer.k, layer.v, layer.A, layer.slope, layer.scale, layer.kind == "softmax")
    moved = core_push(at, _projections(layer, directions))
    U = torch.zeros_like(layer.G)
    if part != "functional":
        U = layer.curve_loss(_output_tangent(layer, directions, moved.dO)[..., None])[..., 0]
    dG = layer.pull_output(U, layer.weights.get("O"))
    if part == "outer":
        return _collect(layer, core_vjp(at, dG)) | _output_weights(layer, U, None)
    if "O" in directions:
        dG = dG + layer.pull_output(layer.G, directions["O"])
    found = core_curve(at, layer.G_heads, moved, dG)
    return _collect(layer, found) | _output_weights(layer, U, moved.dO)


def _projections(layer: AttentionLayer, directions: Mapping[str, Tensor]) -> Triple:
    """Tangents of rotated queries, rotated keys and values."""
    dq, dk, dv = (layer.project(role, directions) for role in "QKV")
    return (
        torch.zeros_like(layer.q) if dq is None else layer.rotate_queries(dq),
        torch.zeros_like(layer.k) if dk is None else layer.rotate_keys(dk),
        torch.zeros_like(layer.v) if dv is None else dv,
    )


def _output_tangent(layer: AttentionLayer, directions: Mapping[str, Tensor], dO: Tensor) -> Tensor:
    """dF = Σ_h dO_h W_O^h + O_h dW_O^h + db_O: (n, L, o)."""
    W_O = layer.weights.get("O")
    dF = dO[:, 0] if W_O is None else merge_heads(dO) @ W_O
    if "O" in directions:
        dF = dF + merge_heads(layer.heads_out) @ directions["O"]
    return dF + directions["b_O"] if "b_O" in directions else dF


def _output_weights(layer: AttentionLayer, U: Tensor, dO: Tensor | None) -> dict[str, Tensor]:
    """Σ O_hᵀ U + dO_hᵀ G for W_O and Σ U for b_O, those of them that are there."""
    found = {"b_O": U.sum((0, 1))[None], "O": merge_heads(layer.heads_out).flatten(0, 1).T @ U.flatten(0, 1)}
    if dO is not None:
        found["O"] = found["O"] + merge_heads(dO).flatten(0, 1).T @ layer.G.flatten(0, 1)
    return {name: found[name] for name in layer.weights if name in found}


def _collect(layer: AttentionLayer, cotangents: Triple) -> dict[str, Tensor]:
    """featureᵀ · cotangent for each weight, heads that share keys and values added."""
    hq, hk, hv = cotangents
    share = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
    by_role = {
        "Q": layer.rotate_queries(hq, back=True),
        "K": layer.rotate_keys(hk, back=True).unflatten(1, share).sum(2),
        "V": hv.unflatten(1, share).sum(2),
    }
    return {
        name: layer.feature(name).flatten(0, 1).T @ merge_heads(by_role[ROLE[name]]).flatten(0, 1)
        for name in layer.weights
        if ROLE[name] != "O"
    }
