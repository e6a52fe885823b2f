"""The norms of `norms.py` in Triton: one kernel for each of forward, backward and second backward.

A program processes complete rows. Each program writes one partial row of sums over tokens; they are added
afterwards, always in the same order. Directions are the fast axis of the grid, so that those of one row share
its x and g in the cache. All arithmetic is in single precision.
"""

# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvescope.core.errors import ShapeError
from curvescope.kernels.backends import Tensors, num_programs, on_device
from curvescope.kernels.norms.function import MAX_WIDTH


@triton.jit
def _forward_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    d,
    eps,
    offset,
    CENTER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < d
    x = tl.load(x_ptr + row * d + cols, mask=inside, other=0.0).to(tl.float32)
    mean = 0.0
    if CENTER:
        mean = tl.sum(x, axis=0) / d
        x = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / d + eps)
    y = x * rstd
    if WEIGHT:
        y = y * (tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset)
    if BIAS:
        y = y + tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * d + cols, y, mask=inside)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward_kernel(
    g_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    c_ptr,
    dw_ptr,
    db_ptr,
    num_rows,
    d,
    offset,
    CENTER: tl.constexpr,
    WEIGHT: tl.constexpr,
    INPUT: tl.constexpr,
    GAIN: tl.constexpr,
    SHIFT: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, step = tl.program_id(1), tl.num_programs(1)
    direction = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < d
    gain = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHT:
        gain = tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for row_number in range(ROWS_PER_PROGRAM):
        row = (first + row_number * step).to(tl.int64)
        live = row < num_rows
        at = row * d + cols
        mask = inside & live
        offsets = direction * num_rows * d + at
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=live, other=0.0)
        x_hat = tl.where(inside, (x - tl.load(mean_ptr + row, mask=live, other=0.0)) * rstd, 0.0)
        pulled = g * gain
        c = tl.sum(x_hat * pulled, axis=0) / d
        if INPUT:
            dx = pulled - x_hat * c
            if CENTER:
                dx = dx - tl.sum(pulled, axis=0) / d
            tl.store(dx_ptr + offsets, rstd * dx, mask=mask)
        if KEEP:
            tl.store(c_ptr + direction * num_rows + row, c, mask=live)
        if GAIN:
            dw += g * x_hat
        if SHIFT:
            db += g
    partial = (direction * step + first) * d + cols
    if GAIN:
        tl.store(dw_ptr + partial, dw, mask=inside)
    if SHIFT:
        tl.store(db_ptr + partial, db, mask=inside)


@triton.jit
def _second_kernel(
    u_ptr,
    s_ptr,
    t_ptr,
    g_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    c_ptr,
    hg_ptr,
    hx_ptr,
    hw_ptr,
    num_rows,
    d,
    offset,
    CENTER: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALONG_X: tl.constexpr,
    ALONG_W: tl.constexpr,
    ALONG_B: tl.constexpr,
    COTANGENT: tl.constexpr,
    INPUT: tl.constexpr,
    GAIN: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, step = tl.program_id(1), tl.num_programs(1)
    direction = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < d
    gain = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHT:
        gain = tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
    s = tl.zeros((BLOCK,), tl.float32)
    t = tl.zeros((BLOCK,), tl.float32)
    if ALONG_W:
        s = tl.load(s_ptr + direction * d + cols, mask=inside, other=0.0).to(tl.float32)
    if ALONG_B:
        t = tl.load(t_ptr + direction * d + cols, mask=inside, other=0.0).to(tl.float32)
    hw = tl.zeros((BLOCK,), tl.float32)
    for row_number in range(ROWS_PER_PROGRAM):
        row = (first + row_number * step).to(tl.int64)
        live = row < num_rows
        at = row * d + cols
        mask = inside & live
        offsets = direction * num_rows * d + at
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=live, other=0.0)
        x_hat = tl.where(inside, (x - tl.load(mean_ptr + row, mask=live, other=0.0)) * rstd, 0.0)
        g = tl.zeros((BLOCK,), tl.float32)
        if INPUT or GAIN:
            g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
        hg = x_hat * s + t
        v = g * s
        moved = tl.zeros((BLOCK,), tl.float32)
        if ALONG_X:
            u = tl.load(u_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            along = tl.sum(x_hat * u, axis=0) / d
            Ju = u - x_hat * along
            if CENTER:
                Ju = Ju - tl.sum(u, axis=0) / d
            Ju = tl.where(inside, rstd * Ju, 0.0)
            hg += gain * Ju
            moved = g * Ju
            if INPUT:
                v -= rstd * (along * gain * g + tl.load(c_ptr + row, mask=live, other=0.0) * u)
        if COTANGENT:
            tl.store(hg_ptr + offsets, hg, mask=mask)
        if INPUT:
            hx = v - x_hat * (tl.sum(x_hat * v, axis=0) / d + tl.sum(moved * gain, axis=0) / d)
            if CENTER:
                hx = hx - tl.sum(v, axis=0) / d
            tl.store(hx_ptr + offsets, rstd * hx, mask=mask)
        if GAIN:
            hw += moved
    if GAIN:
        tl.store(hw_ptr + (direction * step + first) * d + cols, hw, mask=inside)


def forward(form: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """y, and the mean and r of each row, shaped (…, 1)."""
    x, d = x.contiguous(), x.shape[-1]
    rows = x.numel() // d
    y = torch.empty_like(x)
    mean = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    if rows:
        with on_device(x):
            _forward_kernel[(rows,)](
                *_given(x, x, weight, bias),
                y,
                mean,
                rstd,
                d,
                form.eps,
                form.offset,
                CENTER=form.center,
                WEIGHT=weight is not None,
                BIAS=bias is not None,
                **_shape(d),
            )
    return y, mean, rstd


def backward(form: Any, needs: Any, keep: bool, constants: Tensors, directions: Tensors) -> Tensors:
    """dx (k, …, d), dγ (k, d), dβ (k, d), ⟨x̂ḡ⟩ (k, …, 1); None for those not requested."""
    x, weight, mean, rstd = constants
    assert x is not None
    dy = directions[0]
    assert dy is not None
    x, dy, k, d = x.contiguous(), dy.contiguous(), dy.shape[0], x.shape[-1]
    rows = x.numel() // d
    programs = num_programs(x, rows)
    dx = torch.empty_like(dy) if needs[0] else None
    c = torch.empty(*dy.shape[:-1], 1, dtype=torch.float32, device=x.device) if keep else None
    partial = [_partial(x, k, programs) if n else None for n in needs[1:3]]
    with on_device(x):
        _backward_kernel[(k, programs)](
            *_given(x, dy, x, weight, mean, rstd, dx, c, *partial),
            rows,
            d,
            form.offset,
            CENTER=form.center,
            WEIGHT=weight is not None,
            INPUT=bool(needs[0]),
            GAIN=bool(needs[1]),
            SHIFT=bool(needs[2]),
            KEEP=keep,
            ROWS_PER_PROGRAM=_rows_per_program(rows, programs),
            **_shape(d),
        )
    return dx, *(None if p is None else p.sum(1).to(x.dtype) for p in partial), c


def second(form: Any, needs: Any, constants: Tensors, directions: Tensors) -> Tensors:
    """h_g (k, …, d), h_x (k, …, d), h_γ (k, d) for directions (u, s, t); None for those not requested."""
    x, mean, rstd, weight, g, c = constants
    assert x is not None
    u, s, t = (None if v is None else v.contiguous() for v in directions)
    x, d = x.contiguous(), x.shape[-1]
    g = None if g is None else g.contiguous()
    k = next(v.shape[0] for v in (u, s, t) if v is not None)
    rows = x.numel() // d
    programs = num_programs(x, rows)
    curved = u is not None or s is not None
    h_g = torch.empty(k, *x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    h_x = torch.empty(k, *x.shape, dtype=x.dtype, device=x.device) if needs[1] and curved else None
    h_w = _partial(x, k, programs) if needs[2] and u is not None else None
    with on_device(x):
        _second_kernel[(k, programs)](
            *_given(x, u, s, t, g, x, weight, mean, rstd, c, h_g, h_x, h_w),
            rows,
            d,
            form.offset,
            CENTER=form.center,
            WEIGHT=weight is not None,
            ALONG_X=u is not None,
            ALONG_W=s is not None,
            ALONG_B=t is not None,
            COTANGENT=h_g is not None,
            INPUT=h_x is not None,
            GAIN=h_w is not None,
            ROWS_PER_PROGRAM=_rows_per_program(rows, programs),
            **_shape(d),
        )
    return h_g, h_x, None if h_w is None else h_w.sum(1).to(x.dtype)


def _partial(x: Tensor, k: int, programs: int) -> Tensor:
    return torch.empty(k, programs, x.shape[-1], dtype=torch.float32, device=x.device)


def _rows_per_program(rows: int, programs: int) -> int:
    """Number of rows per program, a power of two, so that few kernels are compiled."""
    return triton.next_power_of_2(triton.cdiv(rows, programs))


def _given(placeholder: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Replace None, which a kernel cannot take, by any pointer that it will not use. Gains are made
    contiguous.
    """
    return [placeholder if t is None else t if t.ndim > 1 else t.contiguous() for t in tensors]


def _shape(d: int) -> dict[str, int]:
    """Block size for a row, and number of warps."""
    if d > MAX_WIDTH:
        raise ShapeError(f"expected rows of at most {MAX_WIDTH}, got {d}", hint="use backend='torch'")
    block = triton.next_power_of_2(d)
    return {"BLOCK": block, "num_warps": 32 if block > 4096 else max(block // 256, 1)}
