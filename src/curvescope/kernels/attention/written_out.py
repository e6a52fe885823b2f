"""Attention in plain operations of torch, which can be differentiated any number of times in every mode.

It keeps the whole matrix of scores. For short sequences it is as fast as the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.kernels.tensors import widen


@dataclass(frozen=True)
class Scores:
    """How scores become weights, apart from tensors with derivatives."""

    causal: bool
    window: int | None
    lengths: Tensor | None  # (B,)
    scale: float
    dropout: float


def written_out(
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


def _weights(
    q: Tensor, k: Tensor, bias: Tensor | None, table: Tensor | None, hidden: Tensor | None, how: Scores
) -> Tensor:
    scores = (q * how.scale) @ _repeated(k, q).mT
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if table is not None:
        scores = scores + toeplitz(table, q.shape[2], k.shape[2]).to(scores.dtype)
    unseen = _unseen(q, k, hidden, how)
    if unseen is not None:
        scores = scores.masked_fill(unseen, -torch.inf)
    if unseen is None and bias is None:
        return scores.softmax(-1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)


def toeplitz(table: Tensor, queries: int, keys: int) -> Tensor:
    """(H, Lq, Lk) with entries table[h, j − i + Lq − 1]."""
    row, col = (torch.arange(n, device=table.device) for n in (queries, keys))
    return table[:, col - row[:, None] + queries - 1]


def _unseen(q: Tensor, k: Tensor, hidden: Tensor | None, how: Scores) -> Tensor | None:
    """True at keys that a query does not see, for every rule together; None if all are seen."""
    row = torch.arange(q.shape[2], device=q.device)[:, None]
    col = torch.arange(k.shape[2], device=q.device)
    rules = [] if hidden is None else [hidden]
    if how.causal:
        rules.append(col > row)
    if how.window is not None:
        rules.append((col - row).abs() >= how.window)
    if how.lengths is not None:
        rules.append(col >= how.lengths[:, None, None, None])
    found = None
    for rule in rules:
        found = rule if found is None else found | rule
    return found


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values once for every query head."""
    group = q.shape[1] // max(1, x.shape[1])
    return x if group == 1 else x.repeat_interleave(group, 1)
