"""Softmax attention with a first and a second derivative in memory linear in the length.

PyTorch's fused attention cannot be differentiated twice. This one can: its backward is itself a function with
a backward. Between the passes only Q, K, V, O, dO and the row statistic LSE are stored (and, for short
sequences on a CPU, the weights). On a CUDA device the passes are Triton kernels, elsewhere tiles in torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from curvescope.core.errors import MissingExtra, UsageError
from curvescope.kernels.attention import blockwise
from curvescope.kernels.attention.batching import apply, fold, fold_wide, lead, unfold
from curvescope.kernels.attention.forward_mode import below
from curvescope.kernels.attention.mask import Mask, check
from curvescope.kernels.attention.passes import Passes, Saved
from curvescope.kernels.attention.plain_attention import Scores
from curvescope.kernels.attention.score_modifiers import Extras
from curvescope.kernels.attention.third_order import Plain, ThirdOrder, announce
from curvescope.kernels.autograd import Function, hidden_from_modes
from curvescope.kernels.backends import casting, pulled, pushed
from curvescope.kernels.tensors import given, widen

Several = Sequence[Any]  # tensors or None

Backend = Literal["auto", "triton", "blockwise"]
TRITON_HEADS = {torch.float32: 256, torch.float16: 256, torch.bfloat16: 256}  # largest head of the kernels
AUTO_HEADS = TRITON_HEADS | {torch.float32: 128}  # beyond, single precision does not fit into registers


@hidden_from_modes
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
    size = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return attend(q, k, v, mask=mask, scale=size, second_order=second_order, backend=backend)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    hidden: Tensor | None = None,
    noise: Tensor | None = None,
    *,
    mask: Mask,
    scale: float,
    dropout: float = 0.0,
    second_order: bool = True,
    backend: Backend = "auto",
    third_order: ThirdOrder = "error",
) -> Tensor:
    """Compute `attention` with the modifiers of `Extras`; the arguments are not checked."""
    extra = any(x is not None for x in (bias, table, hidden, noise))
    plain_causal = mask.causal and q.shape[2] == k.shape[2]
    fits = not extra and (plain_causal or not (mask.causal or mask.window))
    rows = _implementation(backend, q, v) if fits else blockwise
    keep = rows is blockwise and _records(q, k, v, bias, table) and blockwise.worth_keeping(q, k)
    if keep:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # once, not in every pass
    options = Options(rows, mask, scale, second_order, keep, dropout, third_order)
    return Attention.apply(q, k, v, bias, table, hidden, noise, options)[0]


@dataclass(frozen=True)
class Options:
    """Options shared by the passes of one call."""

    passes: Passes
    mask: Mask
    scale: float
    second_order: bool
    keep: bool  # P from the forward, dS from the backward
    dropout: float
    third_order: ThirdOrder

    def folded(self, num: int) -> Options:
        """Return the options for `num` concatenated batches."""
        return replace(self, mask=self.mask.repeated(num), keep=False)

    def common(self, q: Tensor, k: Tensor, *tensors: Tensor | None) -> dict[str, Any]:
        """Arguments of every pass; extras only if any are given, because Triton takes none."""
        arguments: dict[str, Any] = {"mask": self.mask, "scale": self.scale}
        if any(x is not None for x in tensors):
            bias, table, hidden, noise = tensors
            arguments["extras"] = Extras(bias, table, hidden, noise, self.dropout, k.shape[1], q.shape[2])
        return arguments

    def plain(self, ten: Several) -> tuple[Plain, list[Tensor]]:
        """Return the same call in plain operations, and its arguments (up to five) that are not None."""
        bias, table, hidden, noise = ten[3:7]
        how = Scores(self.mask, self.scale, self.dropout)
        return Plain(bias is not None, table is not None, hidden, noise, how), _not_none(ten[:5])


class Attention(Function):
    """q, k, v, bias, table to O, LSE and the kept P, of which only O has derivatives.

    The functions below all begin with the same ten tensors: q, k, v, bias and table, which have derivatives,
    then hidden and noise, then O, LSE and P.
    """

    @staticmethod
    def forward(q, k, v, bias, table, hidden, noise, options: Options) -> tuple[Tensor, Tensor, Tensor]:
        common = options.common(q, k, bias, table, hidden, noise)
        with own_precision(q):
            return options.passes.forward(q, k, v, keep=options.keep, **common)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.options = inputs
        ctx.mark_non_differentiable(*output[1:])
        _save(ctx, *tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        do, options = grads[0], ctx.options
        if do is None:
            return (None,) * 8
        *x, hidden, noise, o, lse, P = ctx.saved_tensors
        if not options.second_order:
            x = [None if t is None else t.detach() for t in x]
        keep = options.keep and torch.is_grad_enabled()
        do = do.contiguous() if keep else do
        wants = ctx.needs_input_grad[3:5]
        results = apply(AttentionBackward, *x, hidden, noise, o.detach(), lse, P, do, options, keep, wants)
        return *_spread(results, (True, True, True, *wants)), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, None, None]:
        results = below(apply, AttentionTangent, *ctx.saved_tensors, *tangents[:5], ctx.options)
        return results[0], None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, ...], tuple]:
        *tensors, options = args
        num = info.batch_size
        o, lse, P = Attention.apply(*_folded(tensors, in_dims, num, each=False), options.folded(num))
        return (unfold(o, num), unfold(lse, num), P), (0, 0, None)


class AttentionBackward(Function):
    """The ten tensors and dO to dQ, dK, dV, those of bias and table that `wants` names, and the kept dS.

    The derivatives are total: none are due to O and LSE.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        (q, k, v, bias, table, hidden, noise, *stats), (do, options, keep, wants) = args[:10], args[10:]
        common = options.common(q, k, bias, table, hidden, noise)
        into = _zeros((bias, table), wants)
        if any(wants):
            common["into"] = into
        with own_precision(q):
            *results, dS = options.passes.backward(Saved(q, k, v, *stats), do, keep=keep, **common)
        more = (x.to(y.dtype) for x, y in zip(into, (bias, table), strict=True) if x is not None)
        return *results, *more, dS

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.options, _, ctx.wants = inputs
        ctx.mark_non_differentiable(output[-1])
        _save(ctx, *tensors, output[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        needs = (*wanted[:5], wanted[10])
        directions = _spread(grads[:-1], (True, True, True, *ctx.wants))
        if all(g is None for g in directions) or not any(needs):
            return (None,) * 14
        results = apply(AttentionSecond, *ctx.saved_tensors, *directions, ctx.options, needs)
        *h, ho = _spread(results, needs)
        return *h, *(None,) * 5, ho, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """The second derivative is symmetric in q, k, v, and the backward is linear in dO."""
        wants, options = ctx.wants, ctx.options

        def derivative(*args: Any) -> tuple[Tensor, ...]:
            *ten, do, dS = args[:12]
            tangents_x, tangent_do = args[12:17], args[17]
            results: Any = (None,) * (3 + sum(wants))
            if any(t is not None for t in tangents_x):
                needs = (True, True, True, *wants, False)
                results = apply(AttentionSecond, *ten, do, dS, *tangents_x, options, needs)
            if tangent_do is not None:
                linear = apply(AttentionBackward, *ten, tangent_do, options, False, wants)[:-1]
                results = [y if x is None else x + y for x, y in zip(results, linear, strict=True)]
            return tuple(results)

        return *below(derivative, *ctx.saved_tensors, *tangents[:5], tangents[10]), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, ...], tuple]:
        (*ten, do, options, _, wants), num = args, info.batch_size
        folded, do = _folded(ten, in_dims, num, each=any(wants)), fold(do, in_dims[10], num)
        *results, dS = AttentionBackward.apply(*folded, do, options.folded(num), False, wants)
        each: list[Any] = [
            None if x is None else unfold(x, num) for x in _spread(results, (True, True, True, *wants))
        ]
        for i in (3, 4):
            if each[i] is not None and _batch(ten[i], in_dims[i], num) == 1:
                each[i] = each[i].sum(1, keepdim=True)
        return (*_not_none(each), dS), (*(0,) * len(results), None)


class AttentionTangent(Function):
    """The ten tensors and five directions t to the derivative of O; t may be n directions, (n, B, …)."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        ten, t, options = args[:10], args[10:15], args[15]
        return _second(ten, None, ten[0].new_empty(0), t, options, (*(False,) * 5, True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.options = inputs
        _save(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """⟨u, tangent(x, t)⟩ is ⟨first(x, u), t⟩: its derivative in x is the second one, in t the first."""
        u, options, wanted = grads[0], ctx.options, ctx.needs_input_grad
        if u is None:
            return (None,) * 16
        ten, t = ctx.saved_tensors[:10], ctx.saved_tensors[10:]
        ten = (*ten[:7], ten[7].detach(), *ten[8:])

        def single(t: Several, u: Tensor) -> list[Tensor | None]:
            in_x, in_t = [None] * 5, [None] * 5
            if any(wanted[:5]):
                results = apply(AttentionSecond, *ten, u, u.new_empty(0), *t, options, (*wanted[:5], False))
                in_x = _spread(results, wanted[:5])
            if any(wanted[10:15]):
                wants = (wanted[13], wanted[14])
                results = apply(AttentionBackward, *ten, u, options, False, wants)
                in_t = _spread(results, (True, True, True, *wants))
            return [*in_x, *in_t]

        results = _each_direction(single, t, u) if _several(t) else single(t, u)
        return _wanted(ctx, *results[:5], *(None,) * 5, *results[5:], None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor]:
        options = ctx.options

        def derivative(*args: Any) -> Any:
            ten, t, s, dt = args[:10], args[10:15], args[15:20], args[20:25]
            total = None
            if any(x is not None for x in s):
                if _several(t):
                    each = [
                        apply(AttentionSecondTangent, *ten, *_entry(t, j), *s, options)[0] for j in _range(t)
                    ]
                    total = torch.stack(each)
                else:
                    total = apply(AttentionSecondTangent, *ten, *t, *s, options)[0]
            if any(x is not None for x in dt):
                linear = apply(AttentionTangent, *ten, *dt, options)[0]
                total = linear if total is None else total + linear
            return (total,)

        return below(derivative, *ctx.saved_tensors, *tangents[:5], *tangents[10:15])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, ...], tuple]:
        ten, t, last = args[:10], args[10:15], args[15:]
        dims = in_dims[:10], (), in_dims[10:15]
        return _second_batched(AttentionTangent, (ten, (), t), dims, last, info.batch_size)


class AttentionSecond(Function):
    """Those of hQ, hK, hV, hbias, htable, h_dO that `needs` names.

    The inputs are the ten tensors, dO, dS and five directions; a direction may be n of them, (n, B, …).
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _second(args[:10], args[10], args[11], args[12:17], args[17], args[18])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.options, ctx.needs = inputs
        _save(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        announce(ctx.options.third_order)
        ten, do, g = ctx.saved_tensors[:10], ctx.saved_tensors[10], ctx.saved_tensors[12:]
        plain, x = ctx.options.plain(ten)

        def single(g: Several, *cotangents: Tensor | None) -> list[Tensor | None]:
            outputs = _spread(cotangents, ctx.needs)
            outputs = [_or_zeros(c, y) for c, y in zip(outputs, (*ten[:5], do), strict=True)]
            directions = [_or_zeros(t, y) for t, y in zip(g, ten, strict=False)]
            results = pulled(plain.second, (*x, do, *_not_none(directions)), _not_none(outputs))
            return [
                *plain.spread(results[: plain.num]),
                results[plain.num],
                *plain.spread(results[plain.num + 1 :]),
            ]

        results = _each_direction(single, g, *grads, sums=6) if _several(g) else single(g, *grads)
        return _wanted(ctx, *results[:5], *(None,) * 5, results[5], None, *results[6:], None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        announce(ctx.options.third_order)
        options, needs = ctx.options, ctx.needs

        def derivative(*args: Any) -> tuple[Tensor, ...]:
            ten, do, g, moves = args[:10], args[10], args[12:17], args[17:]
            plain, x = options.plain(ten)

            def single(g: Several, g_dot: Several) -> list[Tensor]:
                g, g_dot = ([_or_zeros(t, y) for t, y in zip(s, ten, strict=False)] for s in (g, g_dot))
                point = [*ten[:5], do]
                along = [_or_zeros(t, y) for t, y in zip((*moves[:5], moves[10]), point, strict=True)]
                results = pushed(
                    plain.second, (*x, do, *_not_none(g)), (*_not_none(along), *_not_none(g_dot))
                )
                full = [*plain.spread(results[: plain.num]), results[plain.num]]
                return [given(t) for t, need in zip(full, needs, strict=True) if need]

            if not _several(g):
                return tuple(single(g, moves[12:17]))
            each = [single(_entry(g, j), _entry(moves[12:17], j)) for j in _range(g)]
            return tuple(map(torch.stack, zip(*each, strict=True)))

        return below(derivative, *ctx.saved_tensors, *tangents[:17])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, ...], tuple]:
        split = args[:10], args[10:12], args[12:17]
        dims = in_dims[:10], in_dims[10:12], in_dims[12:17]
        return _second_batched(AttentionSecond, split, dims, args[17:], info.batch_size)


class AttentionSecondTangent(Function):
    """The ten tensors and five directions t and s to the second derivative of O in t and s."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor]:
        (q, k, v, bias, table, hidden, noise, *stats), options = args[:10], args[20]
        t, s = args[10:15], args[15:20]
        common = options.common(q, k, bias, table, hidden, noise)
        if "extras" in common:
            common["moves"] = (t[3], t[4]), (s[3], s[4])
        with own_precision(q):
            return (
                blockwise.second_tangent(
                    Saved(q, k, v, *stats), (t[0], t[1], t[2]), (s[0], s[1], s[2]), **common
                ),
            )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        *tensors, ctx.options = inputs
        _save(ctx, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        announce(ctx.options.third_order)
        if grads[0] is None:
            return (None,) * 21
        ten = ctx.saved_tensors[:10]
        plain, x = ctx.options.plain(ten)
        t, s = (
            _not_none(_or_zeros(g, y) for g, y in zip(ctx.saved_tensors[i : i + 5], ten, strict=False))
            for i in (10, 15)
        )
        results = pulled(plain.second_tangent, (*x, *t, *s), grads[0])
        in_x, in_t, in_s = (plain.spread(results[i * plain.num : (i + 1) * plain.num]) for i in range(3))
        return _wanted(ctx, *in_x, *(None,) * 5, *in_t, *in_s, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor]:
        announce(ctx.options.third_order)
        options = ctx.options

        def derivative(*args: Any) -> tuple[Tensor]:
            ten, t, s = args[:10], args[10:15], args[15:20]
            moves = args[20:25], args[30:35], args[35:40]
            plain, x = options.plain(ten)
            point = [*x, *(y for g in (t, s) for y in _not_none(map(_or_zeros, g, ten)))]
            along = [y for g in moves for y in _not_none(map(_or_zeros, g, ten))]
            return (pushed(plain.second_tangent, point, along),)

        return below(derivative, *ctx.saved_tensors, *tangents[:20])

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor], tuple]:
        num, ten = info.batch_size, args[:10]
        batch = _batch(ten[0], in_dims[0], num)
        moves = []
        for i in range(10, 20):
            x, dim = args[i], in_dims[i]
            moves.append(
                None if x is None else fold_wide(x, dim, num, batch) if i % 5 > 2 else fold(x, dim, num)
            )
        folded = _folded(ten, in_dims, num, each=True)
        (results,) = AttentionSecondTangent.apply(*folded, *moves, args[20].folded(num))
        return (unfold(results, num),), (0,)


def _second(ten: Several, do: Tensor | None, dS: Tensor, g: Several, options: Options, needs: Any) -> Any:
    """The second derivative for one direction or several, without those that are not needed."""
    q, k, v, bias, table, hidden, noise, *stats = ten
    several = _several(g)
    g = [x if several or x is None else x[None] for x in g]
    num = next(x.shape[0] for x in g if x is not None)
    common, into = options.common(q, k, bias, table, hidden, noise), (None, None)
    if "extras" in common:
        into = _zeros((bias, table), needs[3:5], num)
        common |= {"moves": (g[3], g[4]), "into": into}
    common["needs"] = (*needs[:3], needs[5])
    with own_precision(given(q)):
        *h, ho = options.passes.second(Saved(q, k, v, *stats), do, dS, tuple(g[:3]), **common)
    results = (
        *h,
        *(None if x is None else x.to(y.dtype) for x, y in zip(into, (bias, table), strict=True)),
        ho,
    )
    return tuple(x if several else x.squeeze_(0) for x in results if x is not None)  # not a view


def _second_batched(
    function: Any, args: Any, dims: Any, last: Any, num: int
) -> tuple[tuple[Tensor, ...], tuple]:
    """The `vmap` rule of `AttentionTangent` and `AttentionSecond`.

    If only directions are batched they stay side by side, for which the weights are made once; otherwise
    everything is laid into B.
    """
    (ten, middle, g), (ten_dims, middle_dims, g_dims) = args, dims
    if all(dim is None for dim in (*ten_dims, *middle_dims)):
        led = [None if x is None else lead(x, dim, num) for x, dim in zip(g, g_dims, strict=True)]
        inner = [x.shape[:2] for x in led if x is not None and x.dim() == 6]
        led = [x.flatten(0, 1) if x is not None and inner else x for x in led]
        results = function.apply(*ten, *middle, *led, *last)
        results = tuple(x.unflatten(0, inner[0]) for x in results) if inner else results
        return results, (0,) * len(results)
    axis = max(x.dim() - (dim is not None) for x, dim in zip(g, g_dims, strict=True) if x is not None) - 4
    batch = _batch(ten[0], ten_dims[0], num)
    turned: list[Tensor | None] = []
    for x, dim in zip(g, g_dims, strict=True):
        if x is not None:
            x = lead(x, dim, num).movedim(0, axis)
            x = x.expand(*x.shape[: axis + 1], batch, *x.shape[axis + 2 :]).flatten(axis, axis + 1)
        turned.append(x)
    if middle:
        middle = fold(middle[0], middle_dims[0], num), ten[0].new_empty(0)
    options, *needs = last
    folded = _folded(ten, ten_dims, num, each=True)
    results = iter(function.apply(*folded, *middle, *turned, options.folded(num), *needs))
    outputs = []
    for i, need in enumerate(needs[0] if needs else (*(False,) * 5, True)):
        if need:
            x = next(results).unflatten(axis, (num, -1))
            alone = i in (3, 4) and _batch(ten[i], ten_dims[i], num) == 1
            outputs.append(x.sum(axis + 1, keepdim=True) if alone else x)
    return tuple(outputs), (axis,) * len(outputs)


def _folded(tensors: Several, dims: Any, num: int, *, each: bool) -> list[Tensor | None]:
    """The first seven or all of the ten tensors with `num` batches laid into B.

    A bias that all of them share stays one, unless `each` is to have a derivative.
    """
    q, k, v, bias, table, hidden, noise, *stats = tensors
    batch = _batch(given(q), dims[0], num)
    folded: list[Any] = [fold(given(x), dim, num) for x, dim in zip((q, k, v), dims, strict=False)]
    for i, x in ((3, bias), (4, table), (5, hidden), (6, noise)):
        shared = x is not None and dims[i] is None and x.shape[0] == 1 and not (each and i < 5)
        folded.append(x if shared else fold_wide(x, dims[i], num, batch))
    if stats:
        o, lse, P = map(given, stats)
        folded += [fold(o, dims[7], num), fold(lse, dims[8], num), P.new_empty(0)]
    return folded


def _batch(x: Tensor, dim: int | None, num: int) -> int:
    """B of one of `num` examples."""
    return x.shape[0] if dim is None else x.movedim(dim, 0).shape[1]


def _each_direction(
    function: Any, g: Several, *cotangents: Tensor | None, sums: int = 5
) -> list[Tensor | None]:
    """`function` of one direction after the other; the first results are summed, the others stacked."""
    each = [function(_entry(g, j), *_entry(cotangents, j)) for j in _range(g)]
    results = [None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True)]
    return [x.sum(0) if x is not None and i < sums else x for i, x in enumerate(results)]


def _several(g: Several) -> bool:
    return any(x is not None and x.dim() == 5 for x in g)


def _range(g: Several) -> range:
    return range(next(x.shape[0] for x in g if x is not None))


def _entry(g: Several, j: int) -> list[Tensor | None]:
    return [None if x is None else x[j] for x in g]


def _wanted(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of inputs that require one: for a direction that is not given, torch accepts only None."""
    return tuple(x if need else None for x, need in zip(grads, ctx.needs_input_grad, strict=True))


def _not_none(g: Iterable[Tensor | None]) -> list[Tensor]:
    return [x for x in g if x is not None]


def _or_zeros(x: Tensor | None, like: Tensor | None) -> Tensor | None:
    return torch.zeros_like(like) if x is None and like is not None else x


def _zeros(tensors: Several, wants: Any, *lead: int) -> tuple[Tensor | None, ...]:
    """Zeros to which derivatives in bias and table are added, in at least single precision."""
    pairs = zip(tensors, wants, strict=True)
    return tuple(widen(x[:0]).new_zeros(*lead, *x.shape) if w and x is not None else None for x, w in pairs)


def _spread(results: Any, flags: Any) -> list[Tensor | None]:
    """Results in the places of the flags that are set."""
    each = iter(results)
    return [next(each) if flag else None for flag in flags]


def _save(ctx: FunctionCtx | Any, *tensors: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def own_precision(q: Tensor) -> AbstractContextManager[Any]:
    """Autocast would choose other types for the products inside of the kernels."""
    return torch.autocast(q.device.type, enabled=False) if casting() else nullcontext()


def _records(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


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
