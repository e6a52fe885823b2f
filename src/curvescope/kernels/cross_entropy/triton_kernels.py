"""Rows of logits in Triton: the loss with its gradient, and the softmax's curvature along a direction.

There is one program for each row, with two sweeps over its V entries: the first computes sums, the second
writes. In the second sweep the row is in the cache. Arithmetic is in single precision. Rows are `stride` ≥ V
apart, and entries between them may be read and written, so that wide loads need no exception at the end of a
row.
"""

# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvescope.kernels.backends import on_device


@triton.jit
def _loss_kernel(
    z_ptr,
    y_ptr,
    loss_ptr,
    lse_ptr,
    top_ptr,
    slope_ptr,
    stride,
    size,
    smoothing,
    GRADIENT: tl.constexpr,
    SMOOTH: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    cols = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -1.0e30, tl.float32)  # so far, of each column of the block,
    place = tl.zeros((BLOCK,), tl.int32)  # and where
    mass = tl.zeros((BLOCK,), tl.float32)  # of the others, in units of exp(top)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(NUM):
        at = i * BLOCK + cols
        z = tl.load(z_ptr + at, mask=at < stride, other=0.0)
        z = tl.where(at < size, z, -1.0e30)
        lower = tl.exp(-tl.abs(z - top))
        mass = tl.where(z > top, (mass + 1.0) * lower, mass + tl.where(at < size, lower, 0.0))
        place = tl.where(z > top, at, place)
        top = tl.maximum(top, z)
        if SMOOTH:
            total += tl.where(at < size, z, 0.0)
    highest = tl.max(top, axis=0)
    first = tl.argmax(top, axis=0)
    m = tl.sum(tl.where(cols == first, place, 0), axis=0)
    lower = tl.exp(top - highest)
    rest = tl.sum(mass * lower + tl.where(cols == first, 0.0, lower), axis=0)
    rest += highest - highest  # undefined where a logit is infinite
    series = rest * (1.0 - rest * (0.5 - rest * (0.33333333 - 0.25 * rest)))  # of log(1 + rest)
    log_mass = tl.where(rest < 0.01, series, tl.log(1.0 + rest))
    lse = highest + log_mass
    y = tl.load(y_ptr + row)
    below = highest - tl.load(z_ptr + y)
    loss = log_mass + (1.0 - smoothing) * below
    others = tl.where(y == m, rest, 1.0 + rest - tl.exp(-below))
    slope = -others / (1.0 + rest)
    if SMOOTH:
        loss += smoothing * (highest - tl.sum(total, axis=0) / size)
        slope += smoothing * (size - 1) / size
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)
    tl.store(top_ptr + row, m)
    tl.store(slope_ptr + row, slope)
    if GRADIENT:
        tl.debug_barrier()  # no entry is overwritten before the target's was read
        for i in range(NUM):
            at = i * BLOCK + cols
            z = tl.load(z_ptr + at, mask=at < stride, other=0.0)
            gradient = tl.exp(z - lse)
            if SMOOTH:
                gradient -= smoothing / size
            gradient = tl.where(at == y, slope, gradient)
            tl.store(z_ptr + at, tl.where(at < size, gradient, 0.0), mask=at < stride)


@triton.jit
def _curve_kernel(
    z_ptr,
    dot_ptr,
    top_ptr,
    lse_ptr,
    stride,
    size,
    LOGITS: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    dot_ptr += row * stride
    cols = tl.arange(0, BLOCK)
    lse = 0.0
    if LOGITS:
        lse = tl.load(lse_ptr + row)
    common = tl.load(dot_ptr + tl.load(top_ptr + row))
    sums = tl.zeros((BLOCK,), tl.float32)
    for i in range(NUM):
        at = i * BLOCK + cols
        p = tl.load(z_ptr + at, mask=at < stride, other=0.0)
        if LOGITS:
            p = tl.exp(p - lse)
        dot = tl.load(dot_ptr + at, mask=at < stride, other=0.0)
        sums += tl.where(at < size, p * (dot - common), 0.0)
    mean = tl.sum(sums, axis=0)
    tl.debug_barrier()  # no entry is overwritten before the common one was read
    for i in range(NUM):
        at = i * BLOCK + cols
        p = tl.load(z_ptr + at, mask=at < stride, other=0.0)
        if LOGITS:
            p = tl.where(at < size, tl.exp(p - lse), 0.0)
            tl.store(z_ptr + at, p, mask=at < stride)
        dot = tl.load(dot_ptr + at, mask=at < stride, other=0.0)
        tl.store(dot_ptr + at, p * ((dot - common) - mean), mask=at < stride)


def loss_rows(
    z: Tensor, targets: Tensor, smoothing: float, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ℓ of each row of z (C, V), then lse, m and D_y; with `gradient` z becomes D."""
    losses, lse, slope = torch.empty(3, z.shape[0], dtype=torch.float32, device=z.device)
    top = torch.empty(z.shape[0], dtype=torch.int64, device=z.device)
    with on_device(z):
        _loss_kernel[(z.shape[0],)](
            z,
            targets.contiguous(),
            losses,
            lse,
            top,
            slope,
            z.stride(0),
            z.shape[1],
            float(smoothing),
            GRADIENT=gradient,
            SMOOTH=smoothing > 0,
            **_shape(z),
        )
    return losses, lse, top, slope


def curve_rows(z: Tensor, dot: Tensor, top: Tensor, lse: Tensor | None) -> None:
    """`dot` becomes p∘(dot − p·dot); with lse, z are logits and become p, without it they are p."""
    with on_device(z):
        _curve_kernel[(z.shape[0],)](
            z,
            dot,
            top.contiguous(),
            z if lse is None else lse.contiguous(),
            z.stride(0),
            z.shape[1],
            LOGITS=lse is not None,
            **_shape(z),
        )


def _shape(z: Tensor) -> dict[str, int]:
    block = min(triton.next_power_of_2(z.stride(0)), 4096)
    return {"NUM": triton.cdiv(z.shape[1], block), "BLOCK": block, "num_warps": max(1, min(block // 256, 8))}
