"""Attention and its two derivatives as custom operators of PyTorch, which `torch.compile` does not decompose.

`curvescope::attention` has the derivative `curvescope::attention_backward`, and that has
`curvescope::attention_second`. An output that is not needed is an empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from curvescope.kernels.attention import blockwise
from curvescope.kernels.attention.function import Attention, AttentionBackward, AttentionSecond, Options
from curvescope.kernels.attention.mask import Mask

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? table, Tensor? hidden, Tensor? noise"
_OPTIONS = "Tensor? lengths, bool causal, int? window, float scale, float dropout"
_SAVED = f"{_INPUTS}, Tensor o, Tensor lse, Tensor do"
_MOVES = "Tensor? gq, Tensor? gk, Tensor? gv, Tensor? gb, Tensor? gt"
_SIX = f"({', '.join(['Tensor'] * 6)})"
NUM_OPTIONS = 5


def compiled(*args: Any, mask: Mask, scale: float, dropout: float) -> Tensor:
    """`attend` as an operator, for q, k, v, bias, table, hidden and noise."""
    return attention(*args, mask.lengths, mask.causal, mask.window, scale, dropout)[0]


def _options(
    lengths: Tensor | None, causal: bool, window: int | None, scale: float, dropout: float
) -> Options:
    mask = Mask(causal=causal, window=window, lengths=lengths)
    return Options(blockwise, mask, scale, True, False, dropout, "error")


@custom_op("curvescope::attention", mutates_args=(), schema=f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)")
def attention(*args: Any) -> tuple[Tensor, Tensor]:
    """O and LSE."""
    q, k, v, bias, table, hidden, noise = args[:7]
    o, lse, _ = Attention.forward(q, k, v, bias, table, hidden, noise, _options(*args[7:]))
    return o.contiguous(), lse  # the layout declared to the compiler


@attention.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    q, v = args[0], args[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide)


@custom_op(
    "curvescope::attention_backward",
    mutates_args=(),
    schema=f"({_SAVED}, {_OPTIONS}, bool[] wants) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def attention_backward(*args: Any) -> tuple[Tensor, ...]:
    """dQ, dK, dV, and the derivatives in bias and table."""
    *inputs, o, lse, do = args[:10]
    options, wants = _options(*args[10:15]), args[15]
    *results, _ = AttentionBackward.forward(*inputs, o, lse, o.new_empty(0), do, options, False, wants)
    return _in_place(results, (True, True, True, *wants), o)


@attention_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    wants = True, True, True, *args[15]
    return tuple(_like(x, want, args[0]) for x, want in zip(args[:5], wants, strict=True))


@custom_op(
    "curvescope::attention_second",
    mutates_args=(),
    schema=f"({_SAVED}, {_MOVES}, {_OPTIONS}, bool[] needs) -> {_SIX}",
)
def attention_second(*args: Any) -> tuple[Tensor, ...]:
    """Derivatives of ⟨first(x, dO), g⟩ in q, k, v, bias, table and dO."""
    *inputs, o, lse, do = args[:10]
    nothing, options, needs = o.new_empty(0), _options(*args[15:20]), args[20]
    results = AttentionSecond.forward(*inputs, o, lse, nothing, do, nothing, *args[10:15], options, needs)
    return _in_place(results, needs, o)


@attention_second.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    return tuple(_like(x, need, args[0]) for x, need in zip((*args[:5], args[9]), args[20], strict=True))


def _like(x: Tensor | None, wanted: bool, q: Tensor) -> Tensor:
    if not wanted or x is None:
        return q.new_empty(0)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _in_place(results: Any, flags: Any, like: Tensor) -> tuple[Tensor, ...]:
    """Results in the places of the flags that are set, tensors without entries in the others."""
    each = iter(results)
    return tuple(next(each).contiguous() if flag else like.new_empty(0) for flag in flags)


def _save_forward(ctx: Any, inputs: tuple, output: tuple) -> None:
    lengths, *ctx.options = inputs[7:]
    ctx.save_for_backward(*inputs[:7], *output, lengths)


def _pull_forward(ctx: Any, do: Tensor, _: Any) -> tuple[Any, ...]:
    *ten, lengths = ctx.saved_tensors
    wants = list(ctx.needs_input_grad[3:5])
    results = attention_backward(*ten, do, lengths, *ctx.options, wants)
    grads = [x if need else None for x, need in zip(results, ctx.needs_input_grad, strict=False)]
    return *grads, *(None,) * (2 + NUM_OPTIONS)


def _save_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.wants, (lengths, *ctx.options) = inputs[15], inputs[10:15]
    ctx.save_for_backward(*inputs[:10], lengths)


def _pull_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    *saved, lengths = ctx.saved_tensors
    needs = [*ctx.needs_input_grad[:5], ctx.needs_input_grad[9]]
    moves = [g if want else None for g, want in zip(grads, (True, True, True, *ctx.wants), strict=True)]
    results = attention_second(*saved, *moves, lengths, *ctx.options, needs)
    *h, ho = (x if need else None for x, need in zip(results, needs, strict=True))
    return *h, *(None,) * 4, ho, *(None,) * (NUM_OPTIONS + 1)


attention.register_autograd(_pull_forward, setup_context=_save_forward)
attention_backward.register_autograd(_pull_backward, setup_context=_save_backward)
