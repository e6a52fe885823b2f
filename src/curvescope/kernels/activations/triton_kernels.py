"""Second derivatives of activations in Triton, and gated activations as a whole.

Each kernel reads every input once and writes every output once; φ, φ′ and φ″ are computed in registers, in
single precision. Directions are the fast axis of the grid, so that they share the block of x and g in the
cache.
"""

# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvescope.kernels.backends import Tensors, on_device

BLOCK = 1024
KINDS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "quick_gelu": 3, "relu": 4}


@triton.jit
def _shapes(x, KIND: tl.constexpr):
    """φ, φ′ and φ″: x s(v(x)) with a logistic or normal s."""
    near = tl.minimum(tl.maximum(x, -30.0), 30.0)  # farther out φ″ is zero and its factors overflow
    square = near * near
    if KIND == 4:
        value = tl.where(x > 0, x, 0.0)
        first = tl.where(x > 0, 1.0, 0.0)
        second = x * 0.0
    elif KIND == 0:
        s = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        density = tl.exp(-0.5 * square) * 0.3989422804014327
        value = x * s
        first = s + near * density
        second = density * (2.0 - square)
    elif KIND == 1:
        s = tl.sigmoid(1.5957691216057308 * near * (1.0 + 0.044715 * square))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * square)
        bend = 0.42812889763560147 * near
        both = s * (1.0 - s)
        value = x * s
        first = s + near * slope * both
        second = both * (2.0 * slope + near * (bend + slope * slope * (1.0 - 2.0 * s)))
    else:
        scale = 1.0 if KIND == 2 else 1.702
        s = tl.sigmoid(scale * x)
        both = s * (1.0 - s)
        value = x * s
        first = s + scale * x * both
        second = scale * both * (2.0 + scale * x * (1.0 - 2.0 * s))
    return value, first, second


@triton.jit
def _second_kernel(
    x_ptr,
    g_ptr,
    u_ptr,
    hg_ptr,
    hx_ptr,
    size,
    k,
    KIND: tl.constexpr,
    COTANGENT: tl.constexpr,
    INPUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    at = (program // k).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    offsets = (program % k).to(tl.int64) * size + at
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    _, first, second = _shapes(x, KIND)
    if COTANGENT:
        tl.store(hg_ptr + offsets, first * u, mask=inside)
    if INPUT:
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(hx_ptr + offsets, second * g * u, mask=inside)


@triton.jit
def _gated_forward_kernel(gate_ptr, up_ptr, y_ptr, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value, _, _ = _shapes(tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32), KIND)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, value * up, mask=inside)


@triton.jit
def _gated_backward_kernel(
    gate_ptr, up_ptr, g_ptr, da_ptr, db_ptr, size, k, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    at = (program // k).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    offsets = (program % k).to(tl.int64) * size + at
    value, first, _ = _shapes(tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32), KIND)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(da_ptr + offsets, first * up * g, mask=inside)
    tl.store(db_ptr + offsets, value * g, mask=inside)


@triton.jit
def _gated_second_kernel(
    gate_ptr,
    up_ptr,
    g_ptr,
    a_ptr,
    b_ptr,
    hg_ptr,
    ha_ptr,
    hb_ptr,
    size,
    k,
    KIND: tl.constexpr,
    ALONG_GATE: tl.constexpr,
    ALONG_UP: tl.constexpr,
    COTANGENT: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    at = (program // k).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    offsets = (program % k).to(tl.int64) * size + at
    value, first, second = _shapes(tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32), KIND)
    a = tl.zeros((BLOCK,), tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    if ALONG_GATE:
        a = tl.load(a_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if ALONG_UP:
        b = tl.load(b_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if COTANGENT:
        tl.store(hg_ptr + offsets, first * up * a + value * b, mask=inside)
    if GATE or UP:
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if GATE:
            tl.store(ha_ptr + offsets, g * (second * up * a + first * b), mask=inside)
        if UP:
            tl.store(hb_ptr + offsets, g * first * a, mask=inside)


def second(name: str, needs: Any, constants: Tensors, directions: Tensors) -> Tensors:
    """h_g and h_x (k, …) for directions u (k, …), None where not needed."""
    (x, g), (u,) = (_contiguous(constants), _contiguous(directions))
    assert x is not None
    assert u is not None
    h_g = torch.empty_like(u) if needs[0] else None
    h_x = torch.empty_like(u) if needs[1] and name != "relu" else None
    with on_device(x):
        _second_kernel[_grid(x, u.shape[0])](
            *_given(x, x, g, u, h_g, h_x),
            x.numel(),
            u.shape[0],
            KIND=KINDS[name],
            COTANGENT=h_g is not None,
            INPUT=h_x is not None,
            BLOCK=BLOCK,
        )
    return h_g, h_x


def gated_forward(name: str, gate: Tensor, up: Tensor) -> Tensor:
    """φ(gate) ∘ up."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    with on_device(gate):
        _gated_forward_kernel[_grid(gate, 1)](gate, up, y, gate.numel(), KIND=KINDS[name], BLOCK=BLOCK)
    return y


def gated_backward(name: str, gate: Tensor, up: Tensor, g: Tensor) -> Tensors:
    """φ′∘up∘g and φ∘g (k, …) for cotangents g (k, …)."""
    gate, up, g = gate.contiguous(), up.contiguous(), g.contiguous()
    d_gate, d_up = torch.empty_like(g), torch.empty_like(g)
    k = g.shape[0]
    with on_device(gate):
        _gated_backward_kernel[_grid(gate, k)](
            gate, up, g, d_gate, d_up, gate.numel(), k, KIND=KINDS[name], BLOCK=BLOCK
        )
    return d_gate, d_up


def gated_second(name: str, needs: Any, constants: Tensors, directions: Tensors) -> Tensors:
    """h_g, h_gate and h_up (k, …) for directions a, b (k, …), None where not needed."""
    (gate, up, g), (a, b) = _contiguous(constants), _contiguous(directions)
    assert gate is not None
    some = b if a is None else a
    assert some is not None
    wanted = (needs[0], needs[1], needs[2] and a is not None)
    made = [torch.empty_like(some) if want else None for want in wanted]
    with on_device(gate):
        _gated_second_kernel[_grid(gate, some.shape[0])](
            *_given(gate, gate, up, g, a, b, *made),
            gate.numel(),
            some.shape[0],
            KIND=KINDS[name],
            ALONG_GATE=a is not None,
            ALONG_UP=b is not None,
            COTANGENT=made[0] is not None,
            GATE=made[1] is not None,
            UP=made[2] is not None,
            BLOCK=BLOCK,
        )
    return made


def _grid(x: Tensor, k: int) -> tuple[int]:
    return (max(triton.cdiv(x.numel(), BLOCK), 1) * k,)


def _contiguous(tensors: Tensors) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


def _given(placeholder: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Replace None, which kernels do not accept, by an unused pointer."""
    return [placeholder if t is None else t for t in tensors]
