"""Rows of logits in Triton: the loss with its gradient, and the softmax's curvature along a direction.

One program for each row, two sweeps over its V entries: first the sums, then what is written. A row that was
read a moment ago comes from the cache. Arithmetic is in single precision. Rows lie `stride` ≥ V apart, and
what is between them may be read, and is written as zero, so wide loads need no exception at a row's end.
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
    lse_ptr,
    loss_ptr,
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
    top = tl.full((BLOCK,), -1.0e30, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(NUM):
        at = i * BLOCK + cols
        z = tl.load(z_ptr + at, mask=at < stride, other=0.0)
        z = tl.where(at < size, z, -1.0e30)
        higher = tl.maximum(top, z)
        mass = mass * tl.exp(top - higher) + tl.where(at < size, tl.exp(z - higher), 0.0)
        top = higher
        if SMOOTH:
            total += tl.where(at < size, z, 0.0)
    highest = tl.max(top, axis=0)
    lse = highest + tl.log(tl.sum(mass * tl.exp(top - highest), axis=0))
    y = tl.load(y_ptr + row)
    loss = lse - (1.0 - smoothing) * tl.load(z_ptr + y)
    if SMOOTH:
        loss -= smoothing * tl.sum(total, axis=0) / size
    tl.store(lse_ptr + row, lse)
    tl.store(loss_ptr + row, loss)
    if GRADIENT:
        tl.debug_barrier()  # no entry is overwritten before the target's was read
        for i in range(NUM):
            at = i * BLOCK + cols
            z = tl.load(z_ptr + at, mask=at < stride, other=0.0)
            gradient = tl.exp(z - lse) - tl.where(at == y, 1.0 - smoothing, 0.0)
            if SMOOTH:
                gradient -= smoothing / size
            tl.store(z_ptr + at, tl.where(at < size, gradient, 0.0), mask=at < stride)


@triton.jit
def _curve_kernel(
    z_ptr,
    dot_ptr,
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
    sums = tl.zeros((BLOCK,), tl.float32)
    for i in range(NUM):
        at = i * BLOCK + cols
        p = tl.load(z_ptr + at, mask=at < stride, other=0.0)
        if LOGITS:
            p = tl.exp(p - lse)
        dot = tl.load(dot_ptr + at, mask=at < stride, other=0.0)
        sums += tl.where(at < size, p * dot, 0.0)
    mean = tl.sum(sums, axis=0)
    for i in range(NUM):
        at = i * BLOCK + cols
        p = tl.load(z_ptr + at, mask=at < stride, other=0.0)
        if LOGITS:
            p = tl.where(at < size, tl.exp(p - lse), 0.0)
            tl.store(z_ptr + at, p, mask=at < stride)
        dot = tl.load(dot_ptr + at, mask=at < stride, other=0.0)
        tl.store(dot_ptr + at, p * (dot - mean), mask=at < stride)


def loss_rows(z: Tensor, targets: Tensor, smoothing: float, gradient: bool) -> tuple[Tensor, Tensor]:
    """lse and ℓ of each row of z (C, V); with `gradient` z becomes D."""
    lse = torch.empty(z.shape[0], dtype=torch.float32, device=z.device)
    losses = torch.empty_like(lse)
    with on_device(z):
        _loss_kernel[(z.shape[0],)](
            z,
            targets.contiguous(),
            lse,
            losses,
            z.stride(0),
            z.shape[1],
            float(smoothing),
            GRADIENT=gradient,
            SMOOTH=smoothing > 0,
            **_shape(z),
        )
    return lse, losses


def curve_rows(z: Tensor, dot: Tensor, lse: Tensor | None) -> None:
    """`dot` becomes p∘(dot − p·dot); with lse, z are logits and become p, without it they are p."""
    with on_device(z):
        _curve_kernel[(z.shape[0],)](
            z,
            dot,
            z if lse is None else lse.contiguous(),
            z.stride(0),
            z.shape[1],
            LOGITS=lse is not None,
            **_shape(z),
        )


def _shape(z: Tensor) -> dict[str, int]:
    block = min(triton.next_power_of_2(z.stride(0)), 4096)
    return {"NUM": triton.cdiv(z.shape[1], block), "BLOCK": block, "num_warps": max(1, min(block // 256, 8))}
