"""Attention entropy and logit sizes of a forward pass, whichever function the module calls for attention.

A `TorchFunctionMode` sees the calls of `scaled_dot_product_attention` and of `softmax` over square scores in
one forward pass without gradients. Statistics are of at most `QUERIES` positions of `SEQUENCES` sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

SEQUENCES, QUERIES = 4, 64
MASKED = -1e9  # scores below are masked: libraries add −inf or the smallest number of a type
SOFTMAX = {torch.softmax, Tensor.softmax, F.softmax}


@final
class AttentionStatistics(TorchFunctionMode):
    """Collects the entropy of attention, as a share of the largest, and the largest logit, layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self._entropies: list[Tensor] = []  # (h,) of each layer
        self._logits: list[Tensor] = []
        self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._inside:
            self._inside = True
            try:
                if func is F.scaled_dot_product_attention:
                    self._add(_scores(*args, **kwargs))
                elif func in SOFTMAX and (scores := _square(args[0] if args else kwargs.get("input"))):
                    self._add(scores[0])
            finally:
                self._inside = False
        return func(*args, **kwargs)

    def _add(self, scores: Tensor) -> None:
        """Statistics of scores (B, h, q, T), masked entries far below the others."""
        scores = scores.detach()
        scores = scores if scores.dtype == torch.float64 else scores.float()
        visible = scores > MASKED
        count = visible.sum(-1)
        if not bool((count > 1).any()):
            return
        P = scores.masked_fill(~visible, -math.inf).softmax(-1)
        entropy = -torch.where(P > 0, P * P.clamp_min(1e-38).log(), 0.0).sum(-1)
        share = torch.where(count > 1, entropy / count.clamp_min(2).log(), 0.0)
        heads = share.sum((0, 2)) / (count > 1).sum((0, 2)).clamp_min(1)
        self._entropies.append(heads)
        self._logits.append(scores.masked_fill(~visible, 0.0).abs().amax())

    def numbers(self) -> Mapping[str, float]:
        """The numbers by column; none if no attention was seen."""
        if not self._entropies:
            return {}
        heads = torch.cat(self._entropies)
        return {
            "attention_entropy": float(heads.mean()),
            "attention_entropy_min": float(heads.min()),
            "attention_logit_max": float(torch.stack(self._logits).max()),
        }


def _square(scores: Any) -> tuple[Tensor] | None:
    """Scores (B, h, q, T) of some queries, if a softmax is over square scores of attention."""
    if not isinstance(scores, Tensor) or scores.dim() not in (3, 4) or scores.shape[-1] != scores.shape[-2]:
        return None
    if scores.shape[-1] < 2:
        return None
    scores = scores[:, None] if scores.dim() == 3 else scores
    return (scores[:SEQUENCES, :, _chosen(scores.shape[-2], scores.device)],)


def _scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled and masked scores (B, h, q, T) of some queries, as `scaled_dot_product_attention` has them."""
    T, S = query.shape[-2], key.shape[-2]
    rows = _chosen(T, query.device)
    Q, K = (t[(None,) * (4 - t.dim())].flatten(0, -4)[:SEQUENCES] for t in (query, key))
    if enable_gqa:
        K = K.repeat_interleave(Q.shape[-3] // K.shape[-3], -3)
    scores = (Q[..., rows, :] @ K.transpose(-1, -2)) * (
        1 / math.sqrt(Q.shape[-1]) if scale is None else scale
    )
    if is_causal:
        seen = torch.arange(S, device=rows.device)[None] <= rows[:, None]
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        mask = attn_mask.expand(*attn_mask.shape[:-2], T, S)[..., rows, :]
        mask = mask[:SEQUENCES] if mask.dim() == 4 and mask.shape[0] > 1 else mask
        masked = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        scores = masked
    return scores


def _chosen(count: int, device: torch.device) -> Tensor:
    """Choose at most `QUERIES` positions, evenly spread, the last one among them."""
    number = min(count, QUERIES)
    return torch.linspace(count / number - 1, count - 1, number, device=device).round().long()
