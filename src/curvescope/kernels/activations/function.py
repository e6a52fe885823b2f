"""Activations y = φ(x) with cheap first and second derivatives.

With a cotangent g of y and a cotangent u of dx:

    dx = φ′∘g,      h_g = φ′∘u,      h_x = φ″∘g∘u.

In torch code, the factors φ′ and φ″∘g, which do not depend on the direction u, are computed in the first
backward and cached. The Triton kernels are bound by memory, not by arithmetic, and recompute them from x and
g.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from curvescope.core.errors import UsageError, near_misses
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
from curvescope.kernels.tensors import given, plus, widen

Name = Literal["gelu", "gelu_tanh", "silu", "relu", "quick_gelu"]
_QUICK = 1.702
_FAR = (
    30.0  # for larger |x| the second derivative of gelu is zero in every precision, and its factors overflow
)


class Shape(NamedTuple):
    """φ, (g, x) ↦ φ′(x)∘g and φ″, None where φ″ is zero."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    second: Callable[[Tensor], Tensor] | None


class ActivationForm(NamedTuple):
    """Kind of activation, and how it runs."""

    name: str
    second_order: bool
    triton: bool
    third_order: bool = False  # True: plain operations replace the kernels if a third derivative is recorded

    @property
    def takes_over(self) -> bool:
        """Return True if plain operations replace the kernels now."""
        return self.third_order and recorded() and not transformed()


def gelu(
    x: Tensor,
    approximate: Literal["none", "tanh"] = "none",
    *,
    second_order: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """x Φ(x), or x (1 + tanh(√(2/π)(x + 0.044715 x³)))/2 with `approximate="tanh"`.

    With `second_order=False` the backward records only the derivative in its cotangent.
    """
    if approximate not in ("none", "tanh"):
        raise UsageError(f"expected approximate='none' or 'tanh', got {approximate!r}")
    name = "gelu" if approximate == "none" else "gelu_tanh"
    return activate(x, name, second_order=second_order, backend=backend)


def silu(x: Tensor, *, second_order: bool = True, backend: Backend = "auto") -> Tensor:
    """x ς(x), ς the logistic function; `second_order` as in `gelu`."""
    return activate(x, "silu", second_order=second_order, backend=backend)


def relu(x: Tensor, *, second_order: bool = True, backend: Backend = "auto") -> Tensor:
    """max(x, 0), whose slope at 0 is 0; `second_order` as in `gelu`."""
    return activate(x, "relu", second_order=second_order, backend=backend)


def quick_gelu(x: Tensor, *, second_order: bool = True, backend: Backend = "auto") -> Tensor:
    """x ς(1.702 x); `second_order` as in `gelu`."""
    return activate(x, "quick_gelu", second_order=second_order, backend=backend)


@hidden_from_modes
def activate(
    x: Tensor, name: Name, *, second_order: bool = True, third_order: bool = False, backend: Backend = "auto"
) -> Tensor:
    """φ(x) by the name of φ; `second_order` as in `gelu`.

    With `third_order`, plain operations are used if a third derivative is recorded; otherwise that raises.
    """
    return _Activation.apply(
        x, ActivationForm(check_name(name), second_order, use_triton(backend, x), third_order)
    )[0]


def check_name(name: str) -> str:
    """Return the name of a known activation; raise for others."""
    if name not in get_args(Name):
        raise UsageError(
            f"expected an activation, got {name!r}", hint=near_misses(name, list(get_args(Name)))
        )
    return name


class _Activation(Function):
    """x ↦ φ(x). After a graph has been built through its backward, φ′ is cached for the next ones."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, form: ActivationForm) -> tuple[Tensor]:
        return (SHAPES[form.name].value(x),)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.form = inputs
        ctx.first = None
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        (x,), form, dy = ctx.saved_tensors, ctx.form, cotangents[0]
        if dy is None:
            return None, None
        refuse_batched(dy)
        if recorded():
            at = x if form.second_order else x.detach()
            dx, first, _ = _ActivationGradient.apply(dy, at, ctx.first, form)
            ctx.first = None if transformed() else first
            return dx, None
        return _slope(form.name, dy, x) if ctx.first is None else dy * ctx.first, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return (_slope(ctx.form.name, tangents[0], ctx.saved_tensors[0]),)


class _ActivationGradient(Function):
    """g, x ↦ φ′∘g, with the factors φ′ and φ″∘g if they are cached."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dy: Tensor, x: Tensor, first: Tensor | None, form: ActivationForm) -> Any:
        if form.triton and not forward_mode():
            return _slope(form.name, dy, x), None, None
        slope = SHAPES[form.name].slope(torch.ones_like(x), x) if first is None else first.view_as(first)
        second = SHAPES[form.name].second if form.second_order else None
        return dy * slope, slope, None if second is None else second(widen(x)).mul(dy).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        dy, x, _, ctx.form = inputs
        factors = [t for t in output[1:] if t is not None]
        ctx.mark_non_differentiable(*factors)
        ctx.in_triton = output[1] is None
        point = (x, dy) if ctx.form.third_order else ()
        if ctx.in_triton:
            ctx.save_for_backward(x, dy if ctx.form.second_order else None, *point)
        else:
            ctx.save_for_backward(*output[1:], *point)
        ctx.save_for_forward(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        u, needs, (one, two, *point) = cotangents[0], ctx.needs_input_grad, ctx.saved_tensors
        if u is None:
            return None, None, None, None
        name, in_triton = ctx.form.name, ctx.in_triton
        if ctx.form.takes_over:
            x, dy = point
            return *plain_second(name, plain(name), (x,), dy, (u,)), None, None
        refuse_third()

        def core(constants: Tensors, directions: Tensors) -> Tensors:
            if in_triton:
                from curvescope.kernels.activations import triton_kernels

                return triton_kernels.second(name, needs[:2], constants, directions)
            (slope, curve), along = constants, given(directions[0])
            h_x = None if curve is None or not needs[1] else curve * along
            return given(slope) * along if needs[0] else None, h_x

        return *launch(core, (one, two), (u,)), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        ddy, dx = tangents[:2]
        slope, curve = ctx.saved_tensors[:2]
        along_x = None if dx is None or curve is None else curve * dx
        return plus(None if ddy is None else slope * ddy, along_x), None, None


def plain(name: str) -> Callable[[Tensor], Tensor]:
    """Return PyTorch's φ, which can be differentiated any number of times."""
    return {
        "gelu": F.gelu,
        "gelu_tanh": plain_gelu_tanh,
        "silu": F.silu,
        "relu": F.relu,
        "quick_gelu": lambda x: F.silu(_QUICK * x) / _QUICK,
    }[name]


def plain_gelu_tanh(x: Tensor) -> Tensor:
    """x ς(v) with v = 2√(2/π)(x + 0.044715 x³).

    PyTorch's own has an undefined third derivative where |x| is above 13 (float32) or 26 (float64).
    """
    wide = widen(x)
    v = 2 * math.sqrt(2 / math.pi) * wide * (1 + 0.044715 * wide * wide)
    return (wide * torch.sigmoid(v)).to(x.dtype)


def _slope(name: str, dy: Tensor, x: Tensor) -> Tensor:
    """φ′(x)∘g, for all directions at once if g is batched."""

    def core(constants: Tensors, directions: Tensors) -> Tensors:
        at, g = given(constants[0]), given(directions[0])
        if g.shape[0] == 1:
            return (SHAPES[name].slope(g[0], at)[None],)
        return (SHAPES[name].slope(torch.ones_like(at), at) * g,)

    return given(launch(core, (x,), (dy,))[0])


def _gelu_second(x: Tensor) -> Tensor:
    """ϕ(x) (2 − x²), ϕ the normal density."""
    square = x.clamp(-_FAR, _FAR).square_()
    return square.mul(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi)).mul_(square.neg_().add_(2))


def _gelu_tanh_second(x: Tensor) -> Tensor:
    """2 s′ + x s″ with s = ς(v), v = 2√(2/π)(x + 0.044715 x³): φ = x s."""
    x = x.clamp(-_FAR, _FAR)
    scale, cubic = 2 * math.sqrt(2 / math.pi), 0.044715
    square = x * x
    s = square.mul(scale * cubic).add_(scale).mul_(x).sigmoid_()
    v_first = square.mul(3 * scale * cubic).add_(scale)
    bent = s.mul(-2).add_(1).mul_(x).mul_(v_first).mul_(v_first)  # x v′²(1 − 2s)
    bent.add_(square, alpha=6 * scale * cubic).add_(v_first, alpha=2)  # + x v″ + 2 v′
    return torch.addcmul(s, s, s, value=-1).mul_(bent)


def _silu_second(x: Tensor) -> Tensor:
    """ς(1 − ς)(2 + x(1 − 2ς))."""
    s = torch.sigmoid(x)
    bent = s.mul(-2).add_(1).mul_(x).add_(2)
    return torch.addcmul(s, s, s, value=-1).mul_(bent)


_aten = torch.ops.aten
SHAPES = {
    "gelu": Shape(_aten.gelu, lambda g, x: _aten.gelu_backward(g, x), _gelu_second),
    "gelu_tanh": Shape(
        lambda x: _aten.gelu(x, approximate="tanh"),
        lambda g, x: _aten.gelu_backward(g, x, approximate="tanh"),
        _gelu_tanh_second,
    ),
    "silu": Shape(_aten.silu, lambda g, x: _aten.silu_backward(g, x), _silu_second),
    "relu": Shape(_aten.relu, lambda g, x: _aten.threshold_backward(g, x, 0), None),
    "quick_gelu": Shape(
        lambda x: _aten.silu(_QUICK * x) / _QUICK,
        lambda g, x: _aten.silu_backward(g, _QUICK * x),
        lambda x: _QUICK * _silu_second(_QUICK * x),
    ),
}
