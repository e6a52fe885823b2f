"""Gated activations y = φ(gate) ∘ up (SwiGLU, GeGLU) with cheap first and second derivatives.

With a cotangent g of y, and cotangents a, b of the gradients in gate and up:

    d_gate = φ′∘up∘g,     h_g    = φ′∘up∘a + φ∘b,
    d_up   = φ∘g,         h_gate = φ″∘up∘g∘a + φ′∘g∘b,
                          h_up   = φ′∘g∘a.

Torch code caches the factors φ′∘up, φ′∘g and φ″∘up∘g, which take as much memory as gate, up and g. The Triton
kernels recompute them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError
from curvescope.kernels.activations.function import SHAPES, ActivationForm, Name, check_name, plain
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


@hidden_from_modes
def gated(
    gate: Tensor,
    up: Tensor,
    activation: Name,
    *,
    second_order: bool = True,
    third_order: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """φ(gate) ∘ up, both of one shape: SwiGLU with "silu", GeGLU with "gelu".

    With `second_order=False` the backward records only the derivative in its cotangent; `third_order` as in
    `activate`.
    """
    if gate.shape != up.shape:
        raise ShapeError(f"expected gate and up of one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
    form = ActivationForm(check_name(activation), second_order, use_triton(backend, gate, up), third_order)
    return _Gated.apply(gate, up, form)[0]


class _Gated(Function):
    """gate, up ↦ φ(gate) ∘ up. After a graph has been built through its backward, φ′∘up is cached."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor, form: ActivationForm) -> tuple[Tensor]:
        if form.triton and not transformed():
            from curvescope.kernels.activations import triton_kernels

            return (triton_kernels.gated_forward(form.name, gate, up),)
        return (SHAPES[form.name].value(gate) * up,)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        gate, up, ctx.form = inputs
        ctx.first = None
        ctx.save_for_backward(gate, up)
        ctx.save_for_forward(gate, up)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        (gate, up), form, dy = ctx.saved_tensors, ctx.form, cotangents[0]
        if dy is None:
            return None, None, None
        refuse_batched(dy)
        if recorded():
            if not form.second_order:
                gate, up = gate.detach(), up.detach()
            d_gate, d_up, first = _GatedGradient.apply(dy, gate, up, form)[:3]
            ctx.first = None if transformed() else first
            return d_gate, d_up, None
        if ctx.first is not None:
            return dy * ctx.first, dy * SHAPES[form.name].value(gate), None
        return *_gated_first(form, dy, gate, up), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (gate, up), (a, b), shape = ctx.saved_tensors, tangents[:2], SHAPES[ctx.form.name]
        along_gate = None if a is None else shape.slope(a, gate) * up
        return (plus(along_gate, None if b is None else shape.value(gate) * b),)


class _GatedGradient(Function):
    """g, gate, up ↦ φ′∘up∘g, φ∘g, with the factors φ′∘up, φ′∘g and φ″∘up∘g if they are cached."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dy: Tensor, gate: Tensor, up: Tensor, form: ActivationForm) -> Any:
        if form.triton and not forward_mode():
            return *_gated_first(form, dy, gate, up), None, None, None
        shape = SHAPES[form.name]
        slope = shape.slope(torch.ones_like(gate), gate)
        one, d_up, moved = slope * up, shape.value(gate) * dy, slope * dy
        second = shape.second if form.second_order else None
        three = None if second is None else (second(widen(gate)) * up * dy).to(gate.dtype)
        return one * dy, d_up, one, moved if form.second_order else None, three

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        dy, gate, up, ctx.form = inputs
        ctx.mark_non_differentiable(*(t for t in output[2:] if t is not None))
        ctx.in_triton = output[2] is None
        saved = (gate, up, dy if ctx.form.second_order else None) if ctx.in_triton else (gate, *output[2:])
        ctx.save_for_backward(*saved, *((up, dy) if ctx.form.third_order else ()))
        ctx.num_kept = len(saved)
        ctx.save_for_forward(gate, *output[2:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        a, b = cotangents[:2]
        if a is None and b is None:
            return None, None, None, None
        kept, point = ctx.saved_tensors[: ctx.num_kept], ctx.saved_tensors[ctx.num_kept :]
        if ctx.form.takes_over:
            value, (up, dy) = plain(ctx.form.name), point
            gradients = plain_second("gated", lambda g, x: value(g) * x, (kept[0], up), dy, (a, b))
            return *gradients, None
        refuse_third()
        name, needs, in_triton = ctx.form.name, ctx.needs_input_grad[:3], ctx.in_triton

        def core(constants: Tensors, directions: Tensors) -> Tensors:
            if in_triton:
                from curvescope.kernels.activations import triton_kernels

                return triton_kernels.gated_second(name, needs, constants, directions)
            return _gated_second(name, needs, constants, directions)

        return *launch(core, kept, (a, b)), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        ddy, a, b = tangents[:3]
        gate, one, moved, three = ctx.saved_tensors
        value = SHAPES[ctx.form.name].value(gate)
        along_gate = None if ddy is None else one * ddy
        if moved is not None:
            along_gate = plus(along_gate, None if a is None or three is None else three * a)
            along_gate = plus(along_gate, None if b is None else moved * b)
        along_up = plus(
            None if ddy is None else value * ddy, None if a is None or moved is None else moved * a
        )
        return along_gate, along_up, None, None, None


def _gated_first(form: ActivationForm, dy: Tensor, gate: Tensor, up: Tensor) -> Tensors:
    """φ′∘up∘g and φ∘g."""

    def core(constants: Tensors, directions: Tensors) -> Tensors:
        at, other, g = given(constants[0]), given(constants[1]), given(directions[0])
        if form.triton:
            from curvescope.kernels.activations import triton_kernels

            return triton_kernels.gated_backward(form.name, at, other, g)
        shape = SHAPES[form.name]
        return (shape.slope(other, at) * g, shape.value(at) * g)

    return launch(core, (gate, up), (dy,))


def _gated_second(name: str, needs: Any, constants: Tensors, directions: Tensors) -> Tensors:
    """h_g, h_gate and h_up from the cached factors."""
    (gate, one, moved, three), (a, b) = constants, directions
    h_g = h_gate = h_up = None
    if needs[0]:
        h_g = None if a is None else given(one) * a
        if b is not None:
            value = SHAPES[name].value(given(gate))
            h_g = value * b if h_g is None else h_g.addcmul_(value, b)
    if needs[1]:
        h_gate = None if b is None else given(moved) * b
        if a is not None and three is not None:
            h_gate = three * a if h_gate is None else h_gate.addcmul_(three, a)
    if needs[2] and a is not None:
        h_up = given(moved) * a
    return h_g, h_gate, h_up
