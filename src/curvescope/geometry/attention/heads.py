"""The circuits of every head of a loaded model, found by role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from curvescope.geometry.attention.circuits import Circuit, circuits, rotary_of
from curvescope.geometry.low_rank import factor_all
from curvescope.geometry.roles import check_layer, norm_of, read_norm, weight
from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Transformer


def heads(model: Model, layer: int, *, folded: bool = True) -> list[Circuit]:
    """Return one `Circuit` per query head of a layer: `.head` is its index, `.qk`, `.vo` are its factors.

    Query head i of a grouped layer reads the keys and values of head i // (H / H_kv), its `.kv_head`. With
    rotary positions `.qk` is the form at offset 0 and `.qk_at(Δ)` the form at another offset.

    Args:
        folded: fold the norm before attention into the matrices (pre-norm models). In post-norm models and
            models without a norm nothing is folded, `.foldable` is False and `.note` has the reason. With
            False the matrices are those stored in the model.
    """
    return _with_svd(without_svd(model, layer, folded=folded))


def without_svd(model: Model, layer: int, *, folded: bool) -> list[Circuit]:
    """Return the circuits like `heads`, and compute their singular triples only when they are read."""
    check_layer(model, layer)
    norm, reason = read_norm(model, layer)
    num_heads, num_kv = model.facts["n_heads"], model.facts["n_kv_heads"]
    details = _score_details(model, layer)
    notes = [reason] if reason else []
    notes += _notes(model, layer, details)
    circuits_of_heads = []
    for i in range(num_heads):
        j = i * num_kv // num_heads
        parts = _matrices(model, layer, i, j)
        circuit = circuits(
            **parts,
            scale=_scale(model, layer),
            gamma=norm.gamma,
            beta=norm.beta,
            norm=norm.kind,
            folded=folded and not reason,
        )
        circuits_of_heads.append(
            replace(
                circuit, layer=layer, head=i, kv_head=j, foldable=not reason, note="; ".join(notes), **details
            )
        )
    return circuits_of_heads


def _matrices(model: Model, layer: int, head: int, kv_head: int) -> dict[str, Tensor | None]:
    """Return the four matrices and biases of a head, as stored; a merged W_QK is a W_Q with W_K = I."""
    names = {"Q": head, "K": kv_head, "V": kv_head, "O": head}
    parts = {f"W_{x}": weight(model, f"L{layer}.h{i}.W_{x}") for x, i in names.items()}
    parts |= {f"b_{x}": weight(model, f"L{layer}.h{i}.b_{x}") for x, i in names.items() if x != "O"}
    parts["b_O"] = weight(model, f"L{layer}.b_O")
    merged = weight(model, f"L{layer}.h{head}.W_QK")
    if merged is not None:
        parts |= {"W_Q": merged, "W_K": torch.eye(len(merged), dtype=merged.dtype)}
    return parts


def _attention(model: Model, layer: int) -> Any:
    """Return the module that computes a layer's attention, or None in the zoo."""
    if isinstance(model.module, Transformer):
        return None
    if model.facts.get("kind") == "hooked_transformer":
        return model.module.get_submodule(f"blocks.{layer}.attn")
    return model.module.get_submodule(model.places[f"L{layer}.attn.pattern"].module)


def _scale(model: Model, layer: int) -> float:
    """Return the factor of the scores, which is 1/√h in most families."""
    attention, default = _attention(model, layer), float(model.facts["d_head"]) ** -0.5
    if model.facts.get("kind") == "hooked_transformer":
        return 1 / float(attention.attn_scale)
    if model.facts.get("kind") == "gpt_neo":
        return 1.0
    return float(getattr(attention, "scaling", None) or default)


def _score_details(model: Model, layer: int) -> dict[str, Any]:
    """Return rotary positions, norms on queries and keys, and a cap on the scores, as fields of `Circuit`."""
    attention = _attention(model, layer)
    details: dict[str, Any] = {"rotary": rotary_of(model, layer)}
    if f"L{layer}.q_norm.g" in model.blocks:
        q, k = (norm_of(model, f"L{layer}.{x}_norm") for x in "qk")
        details |= {"q_gain": q.gamma, "k_gain": k.gamma, "qk_eps": q.eps}
    cap = getattr(attention, "attn_logit_softcapping", None)
    if model.facts.get("kind") == "hooked_transformer":
        cap = attention.cfg.attn_scores_soft_cap
    return details | {"softcap": float(cap) if cap is not None and cap > 0 else None}


def _notes(model: Model, layer: int, details: dict[str, Any]) -> list[str]:
    """Return notes on what the bilinear form omits."""
    notes = []
    if "q_gain" in details:
        notes.append("queries and keys are normalized: the form uses their directions and is not bilinear")
    if details["softcap"] is not None:
        notes.append(
            f"scores s become {details['softcap']:g} tanh(s/{details['softcap']:g}), in the same order"
        )
    if details["rotary"] is not None:
        notes.append("rotary positions: offset 0 unless `offset` is given")
    facts = model.facts
    if facts.get("score_bias", "none") != "none" or facts.get("positions") == "alibi":
        notes.append("scores also depend on the offset i − j, for all tokens alike")
    if facts.get("attention") == "linear":
        notes.append("attention is linear: without a softmax nothing cancels, so b_K counts, too")
    if f"L{layer}.ln1_post.g" in model.blocks:
        notes.append("a norm follows attention before its output is added to the stream")
    if any(name.startswith(f"L{layer}.W_") and ".lora_" in name for name in model.blocks):
        notes.append("LoRA matrices are omitted: merge them into the model first")
    if facts.get("parallel"):
        notes.append("attention and feed-forward read the same stream")
    return notes


def _with_svd(circuits_of_heads: list[Circuit]) -> list[Circuit]:
    """Compute the singular triples of all heads as one batch, and return the heads."""
    noise = circuits_of_heads[0].noise
    for name, pairs in (
        ("qk", [c._qk_factors() for c in circuits_of_heads]),
        ("vo", [c._vo_factors() for c in circuits_of_heads]),
    ):
        for circuit, factored in zip(circuits_of_heads, factor_all(pairs, noise=noise), strict=True):
            circuit.__dict__[name] = factored  # fills the cached property
    return circuits_of_heads
