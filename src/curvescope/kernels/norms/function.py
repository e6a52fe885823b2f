"""LayerNorm and RMSNorm over the last axis with cheap first and second derivatives.

Per token y = γ ∘ x̂ + β with x̂ = r P x, r = 1/√(|P x|²/d + ε), where P removes the mean (layer norm) or
nothing (RMS norm). J = ∂x̂/∂x is symmetric, and so is everything below. With a cotangent g of y and ḡ = γ∘g:

    J v  = r (P v − x̂ ⟨x̂ v⟩),     ⟨·⟩ the mean over the row,
    dx   = J ḡ,    dγ = Σ g∘x̂,    dβ = Σ g,
    h_g  = γ∘J u + x̂∘s + t,        for cotangents u, s, t of dx, dγ, dβ,
    h_x  = J(g∘(s − r⟨x̂u⟩γ) − r⟨x̂ḡ⟩u) − r⟨u∘Jḡ⟩ x̂,
    h_γ  = Σ g∘J u,

sums over tokens. Between two directions only x, g and three numbers per token are stored, as in autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.kernels.autograd import Function, hidden_from_modes
from curvescope.kernels.backends import (
    Backend,
    Tensors,
    forward_mode,
    launch,
    plain_second,
    recorded,
    refuse_batched,
    refuse_third,
    transformed,
    use_triton,
)
from curvescope.kernels.norms.plain_norms import plain_layer_norm, plain_rms_norm
from curvescope.kernels.tensors import given, plus, widen

MAX_WIDTH = 16384  # widest row in Triton
_LAYER_NORM = torch.ops.aten.native_layer_norm_backward


class NormForm(NamedTuple):
    """Kind of norm, and how it runs."""

    center: bool
    eps: float
    offset: float
    second_order: bool
    triton: bool
    third_order: bool = False  # True: plain operations replace the kernels if a third derivative is recorded


@hidden_from_modes
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    second_order: bool = True,
    third_order: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """γ ∘ (x − ⟨x⟩)/√(var x + ε) + β over the last axis.

    With `second_order=False` the backward records only the derivative in its cotangent (u ↦ Jᵀu, from which J
    v comes), and stores nothing for the second derivative in x and γ. With `third_order`, plain operations
    are used if a third derivative is recorded; otherwise that raises.
    """
    form = NormForm(True, eps, 0.0, second_order, _in_triton(backend, x, weight, bias), third_order)
    return _normalize(x, weight, bias, form)


@hidden_from_modes
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    second_order: bool = True,
    third_order: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """(offset + γ) ∘ x/√(⟨x²⟩ + ε) over the last axis; `second_order` and `third_order` as in `layer_norm`.

    Without γ the gain is one, whatever the offset.
    """
    form = NormForm(False, eps, offset, second_order, _in_triton(backend, x, weight), third_order)
    return _normalize(x, weight, None, form)


def _in_triton(backend: Backend, x: Tensor, *others: Tensor | None) -> bool:
    return use_triton(backend, x, *others) and (backend == "triton" or x.shape[-1] <= MAX_WIDTH)


def _normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, form: NormForm) -> Tensor:
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != x.shape[-1:]:
            raise ShapeError(f"expected a {name} of {tuple(x.shape[-1:])}, got {tuple(t.shape)}")
    if form.eps < 0:
        raise UsageError(f"expected eps ≥ 0, got {form.eps}")
    return _Norm.apply(x, weight, bias, form)[0]


class _Norm(Function):
    """x, γ, β ↦ y; the mean and r of each row come with it and are not differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, form: NormForm) -> tuple[Tensor, ...]:
        if form.triton and not transformed():
            from curvescope.kernels.norms import triton_kernels

            return triton_kernels.forward(form, x, weight, bias)
        return _forward(form, x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.form = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, weight, *output[1:])
        ctx.save_for_forward(x, weight, *output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        dy, form, needs = cotangents[0], ctx.form, ctx.needs_input_grad[:3]
        if dy is None:
            return None, None, None, None
        x, weight, mean, rstd = ctx.saved_tensors
        refuse_batched(dy)
        if not form.second_order:
            x, weight = x.detach(), None if weight is None else weight.detach()
        if recorded():
            return *_NormGradient.apply(dy, x, weight, mean, rstd, form, needs)[:3], None
        return *_run_first(form, needs, False, dy, x, weight, mean, rstd)[:3], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        constants = (x, mean, rstd, weight, None, None)
        found = _run_second(ctx.form, (True, False, False), constants, tangents[:3])[0]
        return found, None, None


class _NormGradient(Function):
    """g, x, γ ↦ dx, dγ, dβ, and ⟨x̂ḡ⟩ of each row, for the second derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, form: NormForm, needs: Any
    ) -> Any:
        keep = (
            form.second_order or forward_mode() or transformed()
        )  # torch.vmap does not support None as an output
        return tuple(_run_first(form, needs, keep, dy, x, weight, mean, rstd))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        dy, x, weight, mean, rstd, ctx.form, ctx.needs = inputs
        c = output[3]
        if c is not None:
            ctx.mark_non_differentiable(c)
        ctx.save_for_backward(x, mean, rstd, weight, None if c is None else dy, c)
        ctx.save_for_forward(x, mean, rstd, weight, dy, c)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        directions = cotangents[:3]
        if all(t is None for t in directions):
            return (None,) * 7
        if ctx.form.third_order and recorded() and not transformed():
            x, _, _, weight, dy, _ = ctx.saved_tensors
            bias = x.new_zeros(x.shape[-1:]) if directions[2] is not None else None
            value = _plain(ctx.form)
            of_dy, of_x, of_w, _ = plain_second("a norm", value, (x, weight, bias), dy, directions)
            return of_dy, of_x, of_w, *(None,) * 4
        refuse_third()
        found = _run_second(ctx.form, ctx.needs_input_grad[:3], ctx.saved_tensors, directions)
        return *found, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        ddy, dx, dweight = tangents[:3]
        form, needs, constants = ctx.form, ctx.needs, ctx.saved_tensors
        x, mean, rstd, weight, _, _ = constants
        found: list[Tensor | None] = [None, None, None]
        if dx is not None or dweight is not None:
            wanted = (False, needs[0], needs[1])
            found[:2] = _run_second(form, wanted, constants, (dx, dweight, None))[1:]
        if ddy is not None:
            more = _run_first(form, needs, False, ddy, x, weight, mean, rstd)[:3]
            found = [plus(u, v) for u, v in zip(found, more, strict=True)]
        shapes = (x.shape, x.shape[-1:], x.shape[-1:])
        full = zip(found, needs, shapes, strict=True)
        return *(x.new_zeros(shape) if t is None and n else t for t, n, shape in full), None


def _plain(form: NormForm) -> Callable[..., Tensor]:
    """Return the norm as a function of x, γ and β in plain arithmetic."""

    def value(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if form.center:
            return plain_layer_norm(x, x.shape[-1:], weight, bias, form.eps)
        return plain_rms_norm(x, x.shape[-1:], _gain(form, weight), form.eps)

    return value


def _run_first(
    form: NormForm, needs: Any, keep: bool, dy: Tensor, x: Tensor, weight: Tensor | None, *stats: Tensor
) -> Tensors:
    """dx, dγ, dβ (None where not needed) and ⟨x̂ḡ⟩ (None unless `keep`)."""
    if form.triton:
        from curvescope.kernels.norms.triton_kernels import backward as run
    else:
        run = _first

    def core(constants: Tensors, directions: Tensors) -> Tensors:
        return run(form, needs, keep, constants, directions)

    return launch(core, (x, weight, *stats), (dy,))


def _run_second(form: NormForm, needs: Any, constants: Tensors, directions: Tensors) -> Tensors:
    """h_g, h_x, h_γ, None where not needed."""
    if form.triton:
        from curvescope.kernels.norms.triton_kernels import second as run
    else:
        run = _second

    def core(constants: Tensors, directions: Tensors) -> Tensors:
        return run(form, needs, constants, directions)

    return launch(core, constants, directions)


def _forward(form: NormForm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    d, wide = x.shape[-1], widen(x)
    gain, shift = (None if t is None else widen(t) for t in (weight, bias))
    if form.center:
        y, mean, rstd = torch.native_layer_norm(wide, [d], gain, shift, form.eps)
        return y.to(x.dtype), mean, rstd
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + form.eps)
    y = wide * rstd if gain is None else wide * rstd * (gain + form.offset)
    return y.to(x.dtype), torch.zeros_like(rstd), rstd


def _first(form: NormForm, needs: Any, keep: bool, constants: Tensors, directions: Tensors) -> Tensors:
    """dx (k, …, d), dγ (k, d), dβ (k, d), ⟨x̂ḡ⟩ (k, …, 1); None for those not requested."""
    (x, mean, rstd, weight), g = _rows(*(constants[i] for i in (0, 2, 3, 1))), widen(given(directions[0]))
    shape, dtype = g.shape, given(constants[0]).dtype
    gain, g = _gain(form, weight), g.reshape(shape[0], -1, shape[-1])
    fused = form.center and shape[0] == 1
    x_hat = _normalized(form, x, mean, rstd) if keep or not fused else None
    c = row_mean(given(x_hat) * g, gain).reshape(*shape[:-1], 1) if keep else None
    if fused:
        mask = [bool(n) for n in needs]
        if gain is None and mask[2]:  # torch makes no dβ without γ
            gain = x.new_ones(shape[-1])
        found = _LAYER_NORM(g[0], x, [shape[-1]], mean, rstd, gain, gain, mask)
        dx, dweight, dbias = (t[None].to(dtype) if n else None for t, n in zip(found, mask, strict=True))
        return None if dx is None else dx.reshape(shape), dweight, dbias, c
    x_hat, pulled = given(x_hat), g if gain is None else g * gain
    dx = _pull(form, pulled, x, x_hat, mean, rstd).to(dtype).reshape(shape) if needs[0] else None
    dweight = (g * x_hat).sum(1).to(dtype) if needs[1] else None
    return dx, dweight, g.sum(1).to(dtype) if needs[2] else None, c


def _second(form: NormForm, needs: Any, constants: Tensors, directions: Tensors) -> Tensors:
    """h_g (k, …, d), h_x (k, …, d), h_γ (k, d) for directions u, s, t; dy and c only for the last two."""
    whole = given(constants[0])
    x, mean, rstd, weight, g, c = _rows(*constants)
    u, s, t = (None if v is None else widen(v) for v in directions)
    k = next(v.shape[0] for v in (u, s, t) if v is not None)
    u = None if u is None else u.reshape(k, -1, whole.shape[-1])
    s, t = (None if v is None else v[:, None] for v in (s, t))
    if k == 1:
        u, s, t = (None if v is None else v[0] for v in (u, s, t))
    x_hat, gain = _normalized(form, x, mean, rstd), _gain(form, weight)
    along = Ju = None
    if u is not None:
        along = (x_hat * u).mean(-1, keepdim=True)
        Ju = _pull(form, u, x, x_hat, mean, rstd, along)
    h_g = h_x = h_w = None
    if needs[0]:
        h_g = _pushed(x_hat, gain, Ju, s, t)
        h_g = h_g.expand(*h_g.shape[:-2], *x.shape).reshape(k, *whole.shape).to(whole.dtype)
    moved = given(g) * Ju if Ju is not None and (needs[1] or needs[2]) else None
    if needs[2] and moved is not None:
        h_w = moved.sum(-2).reshape(k, -1).to(whole.dtype)
    v = _curved(rstd, gain, given(g), c, along, u, s) if needs[1] else None
    if v is not None:
        h_x = _pull(form, v, x, x_hat, mean, rstd)
        if moved is not None:
            h_x.addcmul_(x_hat, -rstd * row_mean(moved, gain))  # ⟨u∘Jḡ⟩ = ⟨ḡ∘Ju⟩
        h_x = h_x.reshape(k, *whole.shape).to(whole.dtype)
    return h_g, h_x, h_w


def _pushed(
    x_hat: Tensor, gain: Tensor | None, Ju: Tensor | None, s: Tensor | None, t: Tensor | None
) -> Tensor:
    """γ∘J u + x̂∘s + t."""
    start = t if s is None else x_hat * s if t is None else torch.addcmul(t, x_hat, s)
    if Ju is None:
        return given(start)
    if s is not None and gain is not None:
        return given(start).addcmul_(Ju, gain)
    pushed = Ju if gain is None else Ju * gain
    return pushed if start is None else pushed + start


def _curved(
    rstd: Tensor,
    gain: Tensor | None,
    g: Tensor,
    c: Tensor | None,
    along: Tensor | None,
    u: Tensor | None,
    s: Tensor | None,
) -> Tensor | None:
    """g∘(s − r⟨x̂u⟩γ) − r⟨x̂ḡ⟩u: what J multiplies in h_x."""
    if u is None:
        return None if s is None else g * s
    scale = -rstd * given(along)
    if gain is None:
        share = scale * g if s is None else (scale + s).mul_(g)
    else:
        share = (scale * gain if s is None else torch.addcmul(s, scale, gain)).mul_(g)
    return share.addcmul_(u, -rstd * given(c))


def _pull(
    form: NormForm,
    v: Tensor,
    x: Tensor,
    x_hat: Tensor,
    mean: Tensor,
    rstd: Tensor,
    along: Tensor | None = None,
) -> Tensor:
    """J v, with ⟨x̂v⟩ if it is known; for one direction of a layer norm torch has a kernel."""
    if form.center and v.ndim == 2:
        return _LAYER_NORM(v, x, [x.shape[-1]], mean, rstd, None, None, [True, False, False])[0]
    along = (x_hat * v).mean(-1, keepdim=True) if along is None else along
    Jv = (v * rstd).addcmul_(x_hat, -rstd * along)
    return Jv.sub_(rstd * v.mean(-1, keepdim=True)) if form.center else Jv


def _normalized(form: NormForm, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """x̂."""
    return (x - mean).mul_(rstd) if form.center else x * rstd


def _gain(form: NormForm, weight: Tensor | None) -> Tensor | None:
    """Factor of x̂."""
    return weight if weight is None or not form.offset else weight + form.offset


def _rows(x: Tensor | None, mean: Tensor | None, rstd: Tensor | None, weight: Any, *more: Any) -> list[Any]:
    """Tokens as rows (T, ·), in at least single precision; the weight stays (d,)."""
    flat = [None if t is None else t.reshape(-1, t.shape[-1]) for t in (x, mean, rstd, *more)]
    return [None if t is None else widen(t) for t in (*flat[:3], weight, *flat[3:])]


def row_mean(t: Tensor, by: Tensor | None) -> Tensor:
    """⟨t ∘ by⟩ over the last axis, which stays."""
    return t.mean(-1, keepdim=True) if by is None else (t @ by)[..., None] / t.shape[-1]
