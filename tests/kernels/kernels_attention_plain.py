"""Plain softmax attention, with the scores written out: what the fused one is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    group, where = q.shape[1] // k.shape[1], {"device": q.device}
    row, col = torch.arange(q.shape[2], **where)[:, None], torch.arange(k.shape[2], **where)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool, **where)
    if causal:
        seen = seen & (col <= row)
    if window is not None:
        seen = seen & (col > row - window)
    if lengths is not None:
        seen = seen & (col < lengths[:, None, None, None].to(q.device))
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min / 2).softmax(-1)
    return (weights * seen) @ v
