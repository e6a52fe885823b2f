"""Our attention for Hugging Face models: `register_hf()`, then `model.set_attn_implementation("curvescope")`.

Causal, full, windowed and right-padded attention is fused; every other mask, dropout and soft caps go through
plain attention, which also has second derivatives, in memory quadratic in the length. So do queries that see
no key (before the first token of a left-padded sequence); their outputs equal those of eager attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from curvescope.core.errors import CurvescopeError, MissingExtra, ShapeError
from curvescope.core.requirements import how_to_install
from curvescope.kernels.attention import attention

NAME = "curvescope"
WINDOW = "curvescope_window"  # attribute of a key mask that also describes a window
_second_order: ContextVar[bool] = ContextVar("second_order", default=True)


@contextmanager
def differentiated(*, second_order: bool) -> Iterator[None]:
    """Record attention inside the context for second derivatives, or only for first ones and u ↦ Jᵀu."""
    token = _second_order.set(second_order)
    try:
        yield
    finally:
        _second_order.reset(token)


def register_hf() -> str:
    """Make "curvescope" an attention implementation of transformers, and return its name."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise MissingExtra(
            "this needs a transformers in which attention brings its own masks",
            hint=how_to_install("transformers"),
        ) from error
    AttentionInterface.register(NAME, hf_attention)
    AttentionMaskInterface.register(NAME, hf_mask)
    return NAME


def hf_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: heads (B, H, L, d) in, (B, L, H, d_v) and no weights out.

    Args:
        module: Its `is_causal` is used if the argument is None; the last query and the last key have the same
            position.
        query: (B, H, Lq, d), with key (B, Hkv, Lk, d) and value (B, Hkv, Lk, d_v).
        attention_mask: None; (B, Lk), true at keys that are seen; or (B, 1 or H, Lq, Lk), true where a key
            is seen or added to the scores, in which case it stands alone.
        sliding_window: a causal query sees itself and the keys before it, this many in all.
        **kwargs: `softcap` and `position_bias` are honored, attention sinks are refused.
    """
    if kwargs.get("s_aux") is not None:
        raise CurvescopeError("attention sinks have no fused form", hint="use attn_implementation='eager'")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = getattr(attention_mask, WINDOW, sliding_window)
    extras = {"softcap": kwargs.get("softcap"), "bias": kwargs.get("position_bias"), "dropout": dropout}
    if attention_mask is not None and attention_mask.dim() == 4:
        o = _plain(query, key, value, attention_mask, scaling, **extras)
    else:
        lengths = None if attention_mask is None else _lengths(attention_mask, window)
        fits = (attention_mask is None or lengths is not None) and not (
            causal and query.shape[2] != key.shape[2]
        )
        if fits and not any(x is not None for x in (extras["softcap"], extras["bias"])) and not dropout:
            how = {"causal": causal, "scale": scaling, "lengths": lengths, "window": window}
            o = attention(query, key, value, **how, second_order=_second_order.get())
        else:
            whole = _whole_mask(attention_mask, query, key, causal, window)
            o = _plain(query, key, value, whole, scaling, **extras)
    return o.transpose(1, 2).contiguous(), None


def hf_mask(**given: Any) -> Tensor | None:
    """Return the part of a mask that `hf_attention` needs: None, a mask of keys, or the full mask.

    Takes the keywords of transformers' mask functions. Causal, full and sliding masks of whole sequences are
    described by their keys, the last with its window; every other is written out.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    rule, window = given.get("mask_function", causal_mask_function), None
    if _is_sliding(rule, causal_mask_function):
        window = given.get("local_size")
    known = rule in (causal_mask_function, bidirectional_mask_function) or window is not None
    start = given.get("q_offset", 0) if given.get("cache_position") is None else given["cache_position"][0]
    if not known or int(start) or int(given.get("kv_offset", 0)):
        given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(**given)
    keys, length = given.get("attention_mask"), given["kv_length"]
    if keys is not None:
        keys = keys[:, :length].bool()
        keys = None if keys.shape[1] == length and bool(keys.all()) else keys
    if window is None or window >= length:
        return keys
    if keys is None:
        keys = torch.ones(given["batch_size"], length, dtype=torch.bool, device=given.get("device"))
    keys = keys.view_as(keys)
    setattr(keys, WINDOW, window)
    return keys


def _is_sliding(rule: Any, causal_rule: Any) -> bool:
    """Return True if a mask rule of transformers is a window and causality, and nothing else."""
    cells = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    parts = cells[0] if len(cells) == 1 and isinstance(cells[0], tuple) else ()
    names = [getattr(part, "__qualname__", "") for part in parts]
    outer = getattr(rule, "__qualname__", "").startswith("and_masks.")
    return (
        outer
        and len(parts) == 2
        and parts[1] is causal_rule
        and names[0].startswith("sliding_window_overlay.")
    )


def _lengths(keys: Tensor, window: int | None) -> Tensor | None:
    """Return the number of keys of each sequence; None unless they are the first ones and every query sees
    one.
    """
    keys = keys.bool()
    gap, lengths = keys[:, 1:] & ~keys[:, :-1], keys.sum(1)
    blind = lengths <= (0 if window is None else max(0, keys.shape[1] - window))
    return None if bool(gap.any() | blind.any()) else lengths


def _whole_mask(
    keys: Tensor | None, query: Tensor, key: Tensor, causal: bool, window: int | None
) -> Tensor | None:
    """(B or 1, 1, Lq, Lk), true at visible keys; None if all are."""
    Lq, Lk = query.shape[2], key.shape[2]
    col = torch.arange(Lk, device=query.device)
    row = torch.arange(Lk - Lq, Lk, device=query.device)[:, None]
    if window is not None and not causal:
        raise ShapeError("expected a causal layer with sliding_window, or a mask that is written out")
    seen = col[None] <= row if causal else None
    if seen is not None and window is not None:
        seen = seen & (col[None] > row - window)
    if keys is not None:
        visible = torch.nn.functional.pad(keys.bool(), (0, Lk - keys.shape[1]))[:, None, None]
        return visible if seen is None else visible & seen
    return None if seen is None else seen[None, None]


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    *,
    softcap: float | None,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """Softmax attention with any mask, by autograd, as transformers' eager attention does it.

    The lowest finite number is added to scores of hidden keys, so a query without visible keys weighs all
    keys equally.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if mask is not None and mask.dtype == torch.bool:
        mask = scores.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(scores.dtype).min)
    if mask is not None:
        scores = scores + mask
    return torch.dropout(scores.softmax(-1), dropout, train=dropout > 0) @ value
