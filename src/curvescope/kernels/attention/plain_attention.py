"""Attention in plain operations of torch, which can be differentiated any number of times in every mode.

It keeps the whole matrix of scores. For short sequences it is as fast as the kernels or faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvescope.kernels.attention.mask import Mask
from curvescope.kernels.backends import forward_mode, transformed
from curvescope.kernels.tensors import widen

pytorch_plain: Any = torch._scaled_dot_product_attention_math  # pyright: ignore[reportPrivateImportUsage]
"""PyTorch's plain attention: q, k, v, mask, dropout_p, is_causal; returns the output and the weights."""


@dataclass(frozen=True)
class Scores:
    """Options that turn scores into weights, apart from tensors with derivatives."""

    mask: Mask
    scale: float
    dropout: float


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    hidden: Tensor | None,
    noise: Tensor | None,
    how: Scores,
) -> Tensor:
    """softmax(scale·QKᵀ + bias + table) V, weights dropped where `noise` is False; (B, H, Lq, d_v).

    Rows without a key give 0. Half precision is computed in single, as PyTorch does.
    """
    dtype = q.dtype
    q, k, v = (widen(x) for x in (q, k, v))
    weights = _weights(q, k, bias, table, hidden, how)
    if noise is not None:
        weights = weights * noise / (1 - how.dropout) if how.dropout < 1 else weights * 0
    return (weights @ _repeated(v, q)).to(dtype)


def short_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """Attention of short sequences in as few operations as possible: (B, H, Lq, d_v).

    Queries, keys and values have equal numbers of heads. The mask is boolean or of the dtype of q, has the
    axes (Lq, Lk) or four that broadcast to those of the scores, and leaves a key to every query.
    """
    if mask is None and not is_causal and (transformed() or forward_mode()):
        # The levels of a transform see one operation, which saves more time than the fewer operations below.
        return pytorch_plain(q, k, v, None, 0.0, False, scale=scale)[0]
    B, H, Lq, d = q.shape
    Lk, dv = v.shape[2:]
    q, k, v = q.reshape(B * H, Lq, d), k.reshape(B * H, Lk, d).mT, v.reshape(B * H, Lk, dv)
    if is_causal:
        mask = torch.full((Lq, Lk), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    elif mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    if mask is None:
        scores = torch.bmm(q * scale, k)
    else:
        if mask.dim() == 4:
            mask = mask.expand(B, H, -1, -1).reshape(B * H, *mask.shape[2:])
        scores = torch.baddbmm(mask, q, k, alpha=scale)
    return torch.bmm(scores.softmax(-1), v).view(B, H, Lq, dv)


def _weights(
    q: Tensor, k: Tensor, bias: Tensor | None, table: Tensor | None, hidden: Tensor | None, how: Scores
) -> Tensor:
    scores = (q * how.scale) @ _repeated(k, q).mT
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if table is not None:
        scores = scores + _toeplitz(table, q.shape[2], k.shape[2]).to(scores.dtype)
    unseen = _unseen(q, k, hidden, how.mask)
    if unseen is not None:
        scores = scores.masked_fill(unseen, -torch.inf)
    if bias is None and table is None and hidden is None and not how.mask.empties(q.shape[2], k.shape[2]):
        return _softmax(scores)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return _softmax(scores.masked_fill(empty, 0)).masked_fill(empty, 0)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over keys. PyTorch's own raises in a backward through the tangent of a dual number."""
    if transformed() or not (forward_mode() and scores.requires_grad):
        return scores.softmax(-1)
    weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def _toeplitz(table: Tensor, queries: int, keys: int) -> Tensor:
    """(b, h, Lq, Lk) with entries table[b, h, 0, j − i + Lq − 1]."""
    row, col = (torch.arange(n, device=table.device) for n in (queries, keys))
    return table[:, :, 0, col - row[:, None] + queries - 1]


def _unseen(q: Tensor, k: Tensor, hidden: Tensor | None, mask: Mask) -> Tensor | None:
    """True at keys that a query does not see, for every rule together; None if all are seen."""
    row = torch.arange(q.shape[2], device=q.device)[:, None]
    col = torch.arange(k.shape[2], device=q.device)
    rules = [] if hidden is None else [hidden]
    if mask.causal:
        rules.append(col > row)
    if mask.window is not None:
        rules.append((col - row).abs() >= mask.window)
    if mask.lengths is not None:
        rules.append(col >= mask.lengths[:, None, None, None])
    unseen = None
    for rule in rules:
        unseen = rule if unseen is None else unseen | rule
    return unseen


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values once for every query head."""
    group = q.shape[1] // max(1, x.shape[1])
    return x if group == 1 else x.repeat_interleave(group, 1)
