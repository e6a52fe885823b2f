"""Convert the arguments of PyTorch's `scaled_dot_product_attention` for our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from curvescope.core.errors import ShapeError
from curvescope.kernels.attention.function import attend, own_precision
from curvescope.kernels.attention.mask import Mask
from curvescope.kernels.attention.operators import compiled
from curvescope.kernels.attention.plain_attention import (
    Scores,
    plain_attention,
    pytorch_plain,
    short_attention,
)
from curvescope.kernels.attention.third_order import ThirdOrder
from curvescope.kernels.autograd import PLAIN
from curvescope.kernels.backends import casting, forward_mode, transformed
from curvescope.kernels.tensors import widen

PATH: Literal["auto", "kernels", "plain"] = "auto"
PLAIN_SCORES = {"cpu": 1 << 21, "cuda": 1 << 24}  # most scores for plain operations
FEW_SCORES = 400_000  # of all heads: up to here, calls cost more than arithmetic on a CPU


class CallError(ShapeError, RuntimeError):
    """Inconsistent arguments; also a `RuntimeError`, as in PyTorch."""


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
    """Compute `curvescope.nn.functional.scaled_dot_product_attention`."""
    if query.is_nested and not _records(query, key, value):
        fused: Any = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
        return fused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None:
        if type(attn_mask).__name__ == "CausalBias":  # to import the class takes a second
            attn_mask, is_causal = _causal(attn_mask, is_causal, query.device)
        if is_causal and attn_mask is not None:
            raise CallError(
                "Explicit attn_mask should not be set when is_causal=True",
                hint="put the future into attn_mask, or add numbers to the scores by score_bias",
            )
    if third_order not in ("warn", "error"):
        raise CallError(f"expected third_order 'warn' or 'error', got {third_order!r}")
    extended = score_bias is not None or window is not None or key_lengths is not None
    if not (extended or dropout_p) and _is_short(query, key, value, attn_mask, is_causal):
        size = query.shape[3] ** -0.5 if scale is None else float(scale)
        return short_attention(query, key, value, attn_mask, is_causal, size)
    _check(query, key, value, dropout_p, enable_gqa, window)
    casts = casting()
    if casts:
        query, key, value = _cast(query, key, value)
    with own_precision(query) if casts else nullcontext():
        if PATH == "auto" and not extended:
            o = _torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            if o is not None:
                return o
        lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        heads = _heads(query, key, value, enable_gqa)
        lead_shape = (*lead, heads) if query.dim() > 2 else ()
        shape = (*lead_shape, query.shape[-2], key.shape[-2])
        q, k, v = (_four(x, lead, heads, enable_gqa) for x in (query, key, value))
        if k.shape[1] != v.shape[1]:
            k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        table = score_bias.table if isinstance(score_bias, RelativeBias) else None
        masks = attn_mask, score_bias if isinstance(score_bias, Tensor) else None
        bias, hidden = _masks(masks, shape)
        if key_lengths is not None:
            key_lengths = _lengths(key_lengths, lead, q)
            if transformed() and (torch.compiler.is_compiling() or is_functorch_wrapped_tensor(key_lengths)):
                beyond = torch.arange(k.shape[2], device=k.device) >= key_lengths[:, None, None, None]
                hidden, key_lengths = beyond if hidden is None else hidden | beyond, None
        mask = Mask(causal=is_causal, window=window, lengths=key_lengths)
        scores = Scores(
            mask, max(1, q.shape[-1]) ** -0.5 if scale is None else float(scale), float(dropout_p)
        )
        tensors = bias, _table(table, q, k), hidden, _noise(q, k, scores.dropout)
        if _by_kernels(q, k, v):
            options: Any = {"mask": mask, "scale": scores.scale, "dropout": scores.dropout}
            if torch.compiler.is_compiling():
                o = compiled(q, k, v, *tensors, **options)
            else:
                o = attend(q, k, v, *tensors, **options, third_order=third_order)
        else:
            o = plain_attention(q, k, v, *tensors, scores)
    return o.reshape(*shape[:-1], value.shape[-1])


def _causal(bias: Any, is_causal: bool, device: torch.device) -> tuple[Tensor | None, bool]:
    """The mask that PyTorch's class for causal masks stands for, and whether it is that of `is_causal`."""
    if is_causal:
        raise CallError("CausalBias should not be used with causal=True")
    upper = bias.variant.name == "UPPER_LEFT" or bias.seq_len_q == bias.seq_len_kv
    return (None, True) if upper else (bias._materialize(device), False)


def _is_short(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Return True if `short_attention` supports a call, and is its fastest way; measured on a CPU only.

    The checks are written for speed: a forward pass of 16 tokens takes less than 50 microseconds.
    """
    if PATH != "auto" or torch.compiler.is_compiling() or casting():
        return False
    dtype, B, H, Lq, d = (q.dtype, *q.shape) if q.dim() == 4 else (None, 0, 0, 0, 0)
    if dtype not in (torch.float32, torch.float64) or dtype != k.dtype or dtype != v.dtype:
        return False
    if not (
        q.is_cpu and k.is_cpu and v.is_cpu and type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN
    ):
        return False
    Lk = k.shape[-2]
    if k.shape != (B, H, Lk, d) or v.shape[:-1] != (B, H, Lk) or not _few_scores(Lq * Lk, B * H):
        return False
    if not (q.numel() and k.numel() and v.numel()):
        return False
    records = (
        q.requires_grad or k.requires_grad or v.requires_grad or (mask is not None and mask.requires_grad)
    )
    records = records and torch.is_grad_enabled()
    if not transformed() and records == forward_mode():  # both: the softmax is written out; neither: fused
        return False
    return mask is None or (_mask_fits(mask, dtype, (B, H, Lq, Lk)) and _every_row_sees(mask))


def _mask_fits(mask: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Return True if `short_attention` supports a mask for scores of a shape and dtype."""
    if type(mask) not in PLAIN or not mask.is_cpu or mask.dtype not in (torch.bool, dtype):
        return False
    if mask.dim() == 2:
        return mask.shape == shape[2:]
    return mask.dim() == 4 and all(n in (1, size) for n, size in zip(mask.shape, shape, strict=True))


def _torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """Return PyTorch's own attention if it has every derivative that may be needed, and is as fast.

    That is the fused one without derivatives, and the plain one for short sequences. On a GPU, however, fused
    and plain attention drop different weights. A backward through the tangent of the plain one raises for
    dual numbers, and is NaN where a mask hides all keys of a query. None means that PyTorch's attention does
    not suffice.
    """
    if torch.compiler.is_compiling():
        return None
    records, forward = _records(q, k, v, mask), forward_mode()
    drops = dropout_p > 0 and q.device.type != "cpu"  # a checkpoint has to draw the same without a graph
    if not (records or forward or transformed() or drops):
        fused: Any = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
        return fused(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    other_dtype = mask is not None and mask.dtype not in (torch.bool, q.dtype)
    if _by_kernels(q, k, v) or other_dtype:
        return None
    if forward and ((records and not transformed()) or (mask is not None and not _every_row_sees(mask))):
        return None
    if mask is not None and mask.dtype == torch.bool:  # the plain form only adds
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    return pytorch_plain(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _every_row_sees(mask: Tensor) -> bool:
    """Return True if the mask certainly leaves a key to every query; this looks at the numbers, on a CPU."""
    if type(mask) not in PLAIN or mask.device.type != "cpu" or get_proxy_mode() is not None:
        return False
    if is_functorch_wrapped_tensor(mask) or not mask.shape[-1]:
        return False
    if mask.dtype == torch.bool:
        return bool(mask.any(-1).all())
    return bool((mask.detach().amax(-1) > -torch.inf).all())


def _records(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _by_kernels(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if the kernels are faster than plain operations, or need the memory less."""
    if PATH == "plain" or (PATH == "auto" and _plain_is_faster(q, k)):
        return False
    if 0 in (*q.shape, *k.shape, *v.shape):
        return False
    if torch.compiler.is_compiling():
        return not (forward_mode() or transformed())  # operators have a backward and no forward mode
    return get_proxy_mode() is None  # `torch.func.linearize` drops what is written in place


def _plain_is_faster(q: Tensor, k: Tensor) -> bool:
    """Return True for sequences so short that the kernels gain nothing in any derivative.

    The numbers were measured on one thread of a CPU, and on an H200.
    """
    each, heads = q.shape[-2] * k.shape[-2], max(q.shape[:-2].numel(), k.shape[:-2].numel())
    if q.device.type == "cpu":
        return _few_scores(each, heads)
    longest = 256 if q.dtype == torch.float32 else 128
    return each <= longest * longest and each * heads <= PLAIN_SCORES["cuda"]


def _few_scores(each: int, heads: int) -> bool:
    """Return True if heads with so many scores each are faster by plain operations on a CPU."""
    return each * heads <= FEW_SCORES or (each <= 128 * 128 and each * heads <= PLAIN_SCORES["cpu"])


def _check(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, enable_gqa: bool, window: int | None) -> None:
    """Raise unless shapes, types and options fit each other."""
    if not 0 <= dropout_p <= 1:
        raise CallError(f"expected a dropout probability between 0 and 1, got {dropout_p}")
    if window is not None and window < 1:
        raise CallError(f"expected window >= 1, got {window}")
    if q.is_nested or k.is_nested or v.is_nested:
        raise CallError(
            "expected query, key and value that are not nested tensors, because a derivative is recorded",
            hint="pad them, with key_lengths",
        )
    if q.dim() < 2 or not q.dim() == k.dim() == v.dim():
        raise CallError(
            "expected query, key and value with the same number of axes, at least 2, got " + _sizes(q, k, v)
        )
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise CallError(
            "expected queries and keys of one size, and as many keys as values, got " + _sizes(q, k, v)
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise CallError(
            "expected query, key and value of one dtype on one device, got "
            + ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v)),
            hint="cast or move them first",
        )
    if not q.is_floating_point():
        raise CallError(f"expected floating-point query, key and value, got {q.dtype}")
    if enable_gqa and q.dim() < 3:
        raise CallError("expected an axis of heads with enable_gqa=True, got " + _sizes(q, k, v))


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"


def _cast(*tensors: Tensor) -> Sequence[Tensor]:
    """Tensors as autocast gives them to PyTorch's attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


def _heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> int:
    """Number of query heads; 1 for tensors without an axis of heads."""
    if q.dim() == 2:
        return 1
    counts = [x.shape[-3] for x in (q, k, v)]
    if enable_gqa:
        if any(n == 0 or counts[0] % n for n in counts[1:]):
            raise CallError(f"expected a number of query heads that key and value heads divide, got {counts}")
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
        raise CallError(f"expected a mask that broadcasts to {shape}, got {tuple(mask.shape)}")
    if mask.dim() > 4:
        return mask.expand(*shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    if len(shape) > 4 and mask.dim() == 4 and mask.shape[0] > 1:  # the last of several batch axes
        return mask.expand(*shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    return mask[(None,) * (4 - mask.dim())]


def _masks(masks: Sequence[Tensor | None], shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
    """The sum of what is added to the scores, and True where a key is hidden."""
    bias = hidden = None
    for mask in masks:
        if mask is None:
            continue
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise CallError(f"expected a mask of booleans or of floating-point numbers, got {mask.dtype}")
        mask = _mask_four(mask, shape)
        if mask.dtype == torch.bool:
            hidden = ~mask if hidden is None else hidden | ~mask
        else:
            bias = mask if bias is None else bias + mask
    return bias, hidden


def _table(table: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The table of a `RelativeBias` with four axes, as `Extras` has it."""
    if table is None:
        return None
    width = q.shape[2] + k.shape[2] - 1
    if table.dim() != 2 or table.shape[0] not in (1, q.shape[1]) or table.shape[1] != width:
        raise CallError(f"expected a table of shape ({q.shape[1]}, {width}), got {tuple(table.shape)}")
    return table[None, :, None]


def _lengths(lengths: Tensor, lead: torch.Size, q: Tensor) -> Tensor:
    if lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise CallError(f"expected whole numbers as key_lengths, got {lengths.dtype}")
    lengths = lengths.to(q.device, copy=True)  # the caller may count its own up before the backward
    return lengths.expand(lead).reshape(q.shape[0])


def _noise(q: Tensor, k: Tensor, p: float) -> Tensor | None:
    """True where a weight is kept; the random numbers are those that PyTorch's plain attention draws."""
    if p == 0:
        return None
    shape = (*q.shape[:3], k.shape[2])
    ones = torch.ones(shape, dtype=widen(q[:0]).dtype, device=q.device)  # half precision is widened there
    return F.dropout(ones, p) > 0
