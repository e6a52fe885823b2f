"""`F.multi_head_attention_forward`, the function behind `nn.MultiheadAttention`, with our attention inside.

Full, causal and right-padded attention is fused; every other mask, and dropout, are left to PyTorch, whose
plain form also has second derivatives, in memory quadratic in the length. Requested weights are computed
separately from the outputs, so that unused weights cost nothing in the backward passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvescope.kernels.attention.function import attention


@dataclass(frozen=True)
class VisibleKeys:
    """Keys that queries see: j ≤ i if `causal`, and those before `lengths` (B,) if they are given."""

    causal: bool = False
    lengths: Tensor | None = None

    @property
    def is_all(self) -> bool:
        """Return True if every query sees every key."""
        return not self.causal and self.lengths is None


def multihead(
    second_order: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **separate: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """Outputs (L, B, d) and weights as PyTorch gives them, or None if our attention does not support the
    call.

    Args have PyTorch's names; `separate` are its keywords for matrices that are not packed.
    """
    single = query.dim() == 2
    if single:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    fits = query.dim() == key.dim() == value.dim() == 3 and embed_dim_to_check == query.shape[-1]
    static = separate.get("static_k") is not None or separate.get("static_v") is not None
    if not fits or static or query.is_nested or (training and dropout_p > 0):
        return None
    hinted = is_causal and key_padding_mask is None and not need_weights  # then PyTorch reads no mask
    seen = _causal_hint(query, key) if hinted else _visible_keys(attn_mask, key_padding_mask, query, key)
    more_keys = bias_k is not None or add_zero_attn
    if seen is None or (more_keys and not seen.is_all):
        return None
    given = (query, key, value), _matrices(in_proj_weight, separate), in_proj_bias
    q, k, v = _projected(*given, extra=(bias_k, bias_v), zero=add_zero_attn, num_heads=num_heads)
    heads = attention(q, k, v, causal=seen.causal, lengths=seen.lengths, second_order=second_order)
    outputs = F.linear(heads.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    weights = _weights(q, k, seen, average=average_attn_weights) if need_weights else None
    if single:
        outputs, weights = outputs.squeeze(1), None if weights is None else weights.squeeze(0)
    return outputs, weights


def _projected(
    inputs: tuple[Tensor, ...],
    matrices: list[Tensor],
    bias: Tensor | None,
    *,
    extra: tuple[Tensor | None, Tensor | None],
    zero: bool,
    num_heads: int,
) -> list[Tensor]:
    """Queries, keys and values of all heads (B, h, L, k), with the module's own extra keys."""
    biases = [None] * 3 if bias is None else bias.chunk(3)
    q, k, v = (F.linear(x, W, b) for x, W, b in zip(inputs, matrices, biases, strict=True))
    k, v = (_with_more(x, own, zero=zero) for x, own in zip((k, v), extra, strict=True))
    return [x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v)]


def _matrices(packed: Tensor | None, separate: dict[str, Any]) -> list[Tensor]:
    if separate.get("use_separate_proj_weight") or packed is None:
        return [separate[f"{x}_proj_weight"] for x in "qkv"]
    return list(packed.chunk(3))


def _with_more(x: Tensor, extra: Tensor | None, *, zero: bool) -> Tensor:
    """Keys or values (L, B, d) followed by the learned one and one of zeros, if given."""
    more = [] if extra is None else [extra.expand(1, x.shape[1], -1)]
    more += [x.new_zeros(1, *x.shape[1:])] if zero else []
    return torch.cat([x, *more]) if more else x


def _causal_hint(query: Tensor, key: Tensor) -> VisibleKeys | None:
    return VisibleKeys(causal=True) if query.shape[0] == key.shape[0] else None


def _visible_keys(
    mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor
) -> VisibleKeys | None:
    """Return the visible keys of both masks, or None if attention is not causal or right-padded."""
    causal, lengths = False, None
    if mask is not None:
        hidden = _hidden(mask)
        Lq, Lk = query.shape[0], key.shape[0]
        if hidden is None or hidden.shape != (Lq, Lk):
            return None
        future = torch.ones(Lq, Lk, dtype=torch.bool, device=hidden.device).triu(1)
        causal = Lq == Lk and torch.equal(hidden, future)
        if not causal and bool(hidden.any()):
            return None
    if padding is not None:
        hidden = _hidden(padding)
        if hidden is None:
            return None
        num_visible = (~hidden).sum(1)
        back = hidden[:, :-1] & ~hidden[:, 1:]  # a visible key after a hidden one
        if bool(back.any() | (num_visible == 0).any()):
            return None
        lengths = num_visible if bool(hidden.any()) else None
    return VisibleKeys(causal, lengths)


def _hidden(mask: Tensor) -> Tensor | None:
    """True at keys that are hidden; None where a mask adds other numbers than 0 and −∞."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask == -torch.inf
    return hidden if bool((hidden | (mask == 0)).all()) else None


def _weights(q: Tensor, k: Tensor, seen: VisibleKeys, *, average: bool) -> Tensor:
    """softmax(QKᵀ/√d + mask): (B, h, Lq, Lk), or its mean over heads (B, Lq, Lk)."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    place = torch.arange(k.shape[2], device=q.device)
    if seen.causal:
        scores = scores.masked_fill(place > place[:, None], -torch.inf)
    if seen.lengths is not None:
        scores = scores.masked_fill(place >= seen.lengths[:, None, None, None], -torch.inf)
    weights = scores.softmax(-1)
    return weights.mean(1) if average else weights
