"""Arguments of PyTorch's `scaled_dot_product_attention`, brought into the form of our kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.kernels.attention.function import attend
from curvescope.kernels.attention.mask import Mask
from curvescope.kernels.attention.third_order import ThirdOrder
from curvescope.kernels.attention.written_out import Scores, written_out

KERNELS = True


@dataclass(frozen=True)
class RelativeBias:
    """A bias of the scores that depends on j − i alone: `table[h, j − i + Lq − 1]` for query i and key j.

    Args:
        table: (H, Lq + Lk − 1), or (1, Lq + Lk − 1) for all heads; it may require a gradient. ALiBi is
            `slopes[:, None] * torch.arange(1 - Lq, Lk)`, T5 `embedding(buckets(torch.arange(1 - Lq, Lk))).T`.
    """

    table: Tensor


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *,
    score_bias: Tensor | RelativeBias | None,
    window: int | None,
    key_lengths: Tensor | None,
    third_order: ThirdOrder,
) -> Tensor:
    """What `curvescope.nn.functional.scaled_dot_product_attention` says."""
    _check(query, key, value, dropout_p, enable_gqa, window, third_order)
    query, key, value, attn_mask = _cast(query, key, value, attn_mask)
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = _heads(query, key, value, enable_gqa)
    shape = (
        (*lead, heads, query.shape[-2], key.shape[-2])
        if query.dim() > 2
        else (query.shape[-2], key.shape[-2])
    )
    q, k, v = (_four(x, lead, heads, enable_gqa) for x in (query, key, value))
    table = score_bias.table if isinstance(score_bias, RelativeBias) else None
    if table is not None:
        _check_table(table, q, k)
        table = table[None, :, None]
    bias = hidden = None
    for extra in (attn_mask, None if isinstance(score_bias, RelativeBias) else score_bias):
        if extra is None:
            continue
        extra = _mask_four(extra, shape)
        if extra.dtype == torch.bool:
            hidden = ~extra
        else:
            bias = extra if bias is None else bias + extra
    lengths = None if key_lengths is None else _lengths(key_lengths, lead, q)
    mask = Mask(causal=is_causal, window=window, lengths=lengths)
    scores = Scores(mask, q.shape[-1] ** -0.5 if scale is None else float(scale), float(dropout_p))
    noise = _noise(q, k, scores.dropout)
    tensors = bias, table, hidden, noise
    with torch.autocast(q.device.type, enabled=False):
        if KERNELS and 0 not in (*q.shape, *k.shape, *v.shape):
            options = {"mask": mask, "scale": scores.scale, "dropout": scores.dropout}
            o = attend(q, k, v, *tensors, **options, third_order=third_order)
        else:
            o = written_out(q, k, v, *tensors, scores)
    return o.reshape(*shape[:-1], value.shape[-1])


def _check(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, enable_gqa: bool, window: int | None, third_order: str
) -> None:
    """Raise unless shapes, types and options fit each other."""
    if third_order not in ("warn", "error"):
        raise UsageError(f"expected third_order 'warn' or 'error', got {third_order!r}")
    if not 0 <= dropout_p <= 1:
        raise UsageError(f"expected a dropout probability between 0 and 1, got {dropout_p}")
    if window is not None and window < 1:
        raise UsageError(f"expected window >= 1, got {window}")
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
    if any(x.is_nested for x in (q, k, v)):
        raise UsageError(
            "expected query, key and value that are not nested", hint="pad them, with key_lengths"
        )
    if min(q.dim(), k.dim(), v.dim()) < 2 or not q.dim() == k.dim() == v.dim():
        raise ShapeError(
            f"expected query, key and value with the same number of axes, at least 2, got {shapes}"
        )
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ShapeError(f"expected queries and keys of one size, and as many keys as values, got {shapes}")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ShapeError(
            "expected query, key and value of one dtype on one device, got "
            + ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v)),
            hint="cast or move them first",
        )
    if not q.is_floating_point():
        raise ShapeError(f"expected floating-point query, key and value, got {q.dtype}")
    if enable_gqa and q.dim() < 3:
        raise ShapeError(f"expected an axis of heads with enable_gqa=True, got {shapes}")


def _cast(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Tensors as autocast gives them to PyTorch's attention."""
    device = q.device.type
    if not torch.is_autocast_enabled(device) or q.dtype == torch.float64:
        return q, k, v, mask
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype), mask


def _heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> int:
    """Number of query heads; 1 for tensors without an axis of heads."""
    if q.dim() == 2:
        return 1
    counts = [x.shape[-3] for x in (q, k, v)]
    if enable_gqa:
        if any(n == 0 or counts[0] % n for n in counts[1:]):
            raise ShapeError(
                f"expected a number of query heads that key and value heads divide, got {counts}"
            )
        return counts[0]
    (heads,) = torch.broadcast_shapes(*((n,) for n in counts))
    return heads


def _four(x: Tensor, lead: torch.Size, heads: int, enable_gqa: bool) -> Tensor:
    """(B, H, L, d), where axes that are broadcast are views without a copy if there is one batch axis."""
    if x.dim() == 2:
        return x[None, None]
    num = x.shape[-3] if enable_gqa else heads
    x = x.expand(*lead, num, *x.shape[-2:])
    return x[None] if x.dim() == 3 else x.flatten(0, -4)


def _mask_four(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A mask in its own shape, with four axes that broadcast to those of the scores."""
    try:
        fits = torch.broadcast_shapes(mask.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise ShapeError(f"expected a mask that broadcasts to {shape}, got {tuple(mask.shape)}")
    if mask.dim() > 4:
        return mask.expand(*shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    if len(shape) > 4 and mask.dim() == 4 and mask.shape[0] > 1:  # the last of several batch axes
        return mask.expand(*shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    return mask[(None,) * (4 - mask.dim())]


def _check_table(table: Tensor, q: Tensor, k: Tensor) -> None:
    width = q.shape[2] + k.shape[2] - 1
    if table.dim() != 2 or table.shape[0] not in (1, q.shape[1]) or table.shape[1] != width:
        raise ShapeError(f"expected a table of shape ({q.shape[1]}, {width}), got {tuple(table.shape)}")


def _lengths(lengths: Tensor, lead: torch.Size, q: Tensor) -> Tensor:
    if lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ShapeError(f"expected whole numbers as key_lengths, got {lengths.dtype}")
    return lengths.to(q.device).expand(lead).reshape(q.shape[0])


def _noise(q: Tensor, k: Tensor, p: float) -> Tensor | None:
    """True where a weight is kept; the random numbers are those that PyTorch's plain attention draws."""
    if p == 0:
        return None
    shape = (*q.shape[:3], k.shape[2])
    return torch.empty(shape, dtype=q.dtype, device=q.device).bernoulli_(1 - p).bool()
