"""Softmax attention with a first and a second derivative in memory linear in the length.

PyTorch's fused attention cannot be differentiated twice. This one can: its backward is itself a function
with a backward. Between the passes only Q, K, V, O, dO and the row statistic LSE are kept (and, for short
sequences on a CPU, the weights). On a CUDA device the passes are Triton kernels, elsewhere tiles in torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from curvescope.core.errors import CurvescopeError, MissingExtra, UsageError
from curvescope.kernels.attention import blockwise
from curvescope.kernels.attention.batching import apply, fold, lead, unfold
from curvescope.kernels.attention.mask import Mask, check
from curvescope.kernels.attention.passes import Passes, Saved
from curvescope.kernels.autograd import Function, unseen

Backend = Literal["auto", "triton", "blockwise"]
TRITON_HEADS = {torch.float32: 256, torch.float16: 256, torch.bfloat16: 256}  # largest head of the kernels
AUTO_HEADS = TRITON_HEADS | {torch.float32: 128}  # beyond, single precision does not fit into registers


@unseen
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    lengths: Tensor | None = None,
    window: int | None = None,
    second_order: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """softmax(scale·QKᵀ + mask) V for every head, differentiable twice and in forward mode.

    Query head h uses key head h // (H // Hkv). A query that sees no key gives 0, and so do its derivatives.

    Args:
        q: (B, H, Lq, d), with any strides.
        k: (B, Hkv, Lk, d), where Hkv divides H.
        v: (B, Hkv, Lk, d_v).
        causal: query i sees keys j ≤ i; Lq = Lk.
        scale: 1/√d unless given.
        lengths: (B,); keys at and after this position are not seen.
        window: with `causal`, query i sees only keys j > i − window.
        second_order: False leaves q, k, v out of the graph of the backward, which is then linear in the
            incoming gradient only: enough for J v as the derivative of u ↦ Jᵀu, and cheaper.
        backend: "auto" takes Triton on a CUDA device, and torch elsewhere, in float64 and for a single query.

    Returns:
        (B, H, Lq, d_v).
    """
    mask = Mask(causal=causal, window=window, lengths=lengths)
    check(q, k, v, mask)
    rows = _implementation(backend, q, v)
    keep = rows is blockwise and _records(q, k, v) and blockwise.worth_keeping(q, k)
    size = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if keep:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # once, not in every pass
    return Attention.apply(q, k, v, Options(rows, mask, size, second_order, keep))[0]


@dataclass(frozen=True)
class Options:
    """What the passes of one call have in common."""

    passes: Passes
    mask: Mask
    scale: float
    second_order: bool
    keep: bool  # P from the forward, dS from the backward

    def folded(self, num: int) -> Options:
        """For `num` batches laid one after the other."""
        return replace(self, mask=self.mask.repeated(num), keep=False)


class Attention(Function):
    """q, k, v to O, LSE and the kept P, of which only O has derivatives."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
        return options.passes.forward(q, k, v, mask=options.mask, scale=options.scale, keep=options.keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.options = inputs
        ctx.mark_non_differentiable(*output[1:])
        _save(ctx, *tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (do, *_), (q, k, v, o, lse, P), options = grads, ctx.saved_tensors, ctx.options
        if do is None:
            return None, None, None, None
        if not options.second_order:
            q, k, v = q.detach(), k.detach(), v.detach()
        keep = options.keep and torch.is_grad_enabled()
        do = do.contiguous() if keep else do
        found = apply(AttentionBackward, q, k, v, o.detach(), lse, P, do, options, keep)
        return *found[:3], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None, None]:
        q, k, v, o, lse, P = ctx.saved_tensors
        primal, needs = (q, k, v, o, lse, P, None, q.new_empty(0)), (False, False, False, True)
        return *AttentionSecond.apply(*primal, *tangents[:3], ctx.options, needs), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, ...], tuple]:
        (*tensors, options), num = args, info.batch_size
        folded = [fold(x, dim, num) for x, dim in zip(tensors, in_dims, strict=False)]
        o, lse, P = Attention.apply(*folded, options.folded(num))
        return (unfold(o, num), unfold(lse, num), P), (0, 0, None)


class AttentionBackward(Function):
    """q, k, v and dO to dQ, dK, dV and the kept dS. The derivatives are total: none are due to O and LSE."""

    @staticmethod
    def forward(q, k, v, o, lse, P, do, options: Options, keep: bool) -> tuple[Tensor, ...]:
        saved = Saved(q, k, v, o, lse, P)
        return options.passes.backward(saved, do, mask=options.mask, scale=options.scale, keep=keep)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.options, _ = inputs
        ctx.mark_non_differentiable(output[3])
        _save(ctx, *tensors, output[3])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        needs = (wanted[0], wanted[1], wanted[2], wanted[6])
        if all(g is None for g in grads[:3]) or not any(needs):
            return (None,) * 9
        found = iter(apply(AttentionSecond, *ctx.saved_tensors, *grads[:3], ctx.options, needs))
        hq, hk, hv, ho = (next(found) if need else None for need in needs)
        return hq, hk, hv, None, None, None, ho, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """The second derivative is symmetric in q, k, v, and the backward is linear in dO."""
        *primal, do, dS = ctx.saved_tensors
        moved, turned, options = tangents[:3], tangents[6], ctx.options
        found: tuple[Any, ...] = (None, None, None)
        if any(t is not None for t in moved):
            found = AttentionSecond.apply(*primal, do, dS, *moved, options, (True, True, True, False))
        if turned is not None:
            linear = AttentionBackward.apply(*primal, turned, options, False)[:3]
            found = tuple(y if x is None else x + y for x, y in zip(found, linear, strict=True))
        return *found, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, ...], tuple]:
        (q, k, v, o, lse, P, do, options, _), num = args, info.batch_size
        dims = (*in_dims[:5], in_dims[6])
        tensors = [fold(x, dim, num) for x, dim in zip((q, k, v, o, lse, do), dims, strict=True)]
        folded = (*tensors[:5], P.new_empty(0), tensors[5])
        *found, dS = AttentionBackward.apply(*folded, options.folded(num), False)
        return (*(unfold(x, num) for x in found), dS), (0, 0, 0, None)


class AttentionSecond(Function):
    """Those of hQ, hK, hV, h_dO that `needs` names, for one direction (B, H, L, d) or (n, B, H, L, d)."""

    @staticmethod
    def forward(q, k, v, o, lse, P, do, dS, gq, gk, gv, options: Options, needs) -> tuple[Tensor, ...]:
        several = any(g is not None and g.dim() == 5 for g in (gq, gk, gv))
        gq, gk, gv = (g if several or g is None else g[None] for g in (gq, gk, gv))
        saved = Saved(q, k, v, o, lse, P)
        found = options.passes.second(
            saved, do, dS, (gq, gk, gv), mask=options.mask, scale=options.scale, needs=needs
        )
        return tuple(x if several else x[0] for x in found if x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise CurvescopeError(
            "fused attention has no third derivative",
            hint="switch the model to plain attention, e.g. attn_implementation='eager'",
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, ...], tuple]:
        *tensors, options, needs = args
        primal, num = tensors[:8], info.batch_size
        moved = list(zip(tensors[8:], in_dims[8:11], strict=True))
        if any(dim is not None for dim in in_dims[:8]):
            return _second_of_batches(primal, moved, in_dims, options, needs, num)
        led = [None if g is None else lead(g, dim, num) for g, dim in moved]
        inner = [g.shape[:2] for g in led if g is not None and g.dim() == 6]
        led = [g.flatten(0, 1) if g is not None and inner else g for g in led]
        found = AttentionSecond.apply(*primal, *led, options, needs)
        if inner:
            found = tuple(x.unflatten(0, inner[0]) for x in found)
        return found, (0,) * len(found)


def _second_of_batches(primal, moved, in_dims, options: Options, needs, num: int) -> tuple[tuple, tuple]:
    """The second derivative where q, k, v or dO themselves are batched: everything is laid into B."""
    *x, P, do, _ = primal
    x = [fold(t, dim, num) for t, dim in zip(x, in_dims[:5], strict=True)]
    do, empty = None if do is None else fold(do, in_dims[6], num), P.new_empty(0)
    axis = max(g.dim() - (dim is not None) for g, dim in moved if g is not None) - 4
    turned = [None if g is None else lead(g, dim, num).movedim(0, axis) for g, dim in moved]
    turned = [None if g is None else g.flatten(axis, axis + 1) for g in turned]
    found = AttentionSecond.apply(*x, empty, do, empty, *turned, options.folded(num), needs)
    return tuple(y.unflatten(axis, (num, -1)) for y in found), (axis,) * len(found)


def _save(ctx: FunctionCtx | Any, *tensors: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _records(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _implementation(backend: str, q: Tensor, v: Tensor) -> Passes:
    """The passes for these tensors; for one query Triton would compile them all again to no gain."""
    if backend not in ("auto", "triton", "blockwise"):
        raise UsageError(f"expected backend 'auto', 'triton' or 'blockwise', got {backend!r}")
    largest = (TRITON_HEADS if backend == "triton" else AUTO_HEADS).get(q.dtype, 0)
    fits = max(q.shape[-1], v.shape[-1]) <= largest
    wanted = backend == "triton" or (backend == "auto" and q.is_cuda and q.shape[2] > 1)
    if not (wanted and fits):
        return blockwise
    if find_spec("triton") is None:
        if backend == "auto":
            return blockwise
        raise MissingExtra(
            "backend='triton' needs the package triton", hint="install it, or use backend='auto'"
        )
    from curvescope.kernels.attention import triton_passes

    return triton_passes
