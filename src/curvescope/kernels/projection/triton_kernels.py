"""The pass of `function.py` in Triton: a program processes its tiles of entries one by one, with all rows.

A tile of BLOCK entries of m rows is read from memory for x = w − Qᵀ c, and again for Q x while it is in the
cache. A multiprocessor runs only as many programs as have space in its cache for their tiles. A program adds
the sums of its tiles in float64, in its own memory; sums of programs are added at the end, always in the same
order.
"""

# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from curvescope.kernels.backends import on_device

BLOCK = 128  # entries of a tile: a warp reads 512 bytes of a row, and sums them without the others
ROWS = 32  # of them at a time
WARPS = 8
CACHE = 200 * 2**10  # bytes of tiles on a multiprocessor at a time, of the 256 KiB of its cache
MAX_PROGRAMS, MIN_PROGRAMS = 8, 2  # programs on a multiprocessor


@triton.jit
def _add_rows(total, q_ptr, c_ptr, m, stride, cols, inside, ROWS: tl.constexpr):
    """total + Q ∘ c, added some rows at a time."""
    rows = tl.arange(0, ROWS)
    for first in range(0, m, ROWS):
        at = first + rows
        live = at < m
        c = tl.load(c_ptr + at, mask=live, other=0.0)
        offsets = at.to(tl.int64)[:, None] * stride + cols[None, :]
        q = tl.load(q_ptr + offsets, mask=live[:, None] & inside[None, :], other=0.0)
        total += q.to(tl.float32) * c[:, None]
    return total


@triton.jit
def _store_dots(x, q_ptr, sums_ptr, m, stride, cols, inside, ROWS: tl.constexpr):
    """Q x of this tile."""
    rows = tl.arange(0, ROWS)
    for first in range(0, m, ROWS):
        at = first + rows
        live = at < m
        offsets = at.to(tl.int64)[:, None] * stride + cols[None, :]
        q = tl.load(q_ptr + offsets, mask=live[:, None] & inside[None, :], other=0.0)
        before = tl.load(sums_ptr + at, mask=live, other=0.0)
        tl.store(sums_ptr + at, before + tl.sum(q.to(tl.float32) * x[None, :], axis=1), mask=live)


@triton.jit
def _take_out_kernel(
    w_ptr,
    near_ptr,
    far_ptr,
    c_ptr,
    out_ptr,
    sums_ptr,
    n,
    tiles,
    m_near,
    m_far,
    w_stride,
    near_stride,
    far_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own = sums_ptr + tl.program_id(0) * (m_near + m_far + 1)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tl.debug_barrier()  # other threads read the sums of the tile before
        cols = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < n
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        total = _add_rows(total, near_ptr, c_ptr, m_near, near_stride, cols, inside, ROWS)
        total = _add_rows(total, far_ptr, c_ptr + m_near, m_far, far_stride, cols, inside, ROWS)
        x = tl.load(w_ptr + cols * w_stride, mask=inside, other=0.0) - tl.sum(total, axis=0)
        tl.store(out_ptr + cols, x, mask=inside)
        tl.store(own, tl.load(own) + tl.sum(x * x, axis=0))
        _store_dots(x, near_ptr, own + 1, m_near, near_stride, cols, inside, ROWS)
        _store_dots(x, far_ptr, own + 1 + m_near, m_far, far_stride, cols, inside, ROWS)


def subtract_projection(w: Tensor, near: Tensor, far: Tensor | None, c: Tensor, out: Tensor) -> Tensor:
    """See `function.take_out`."""
    c = c.to(torch.float32).contiguous()
    rows = near, near[:0] if far is None else far
    tiles = triton.cdiv(len(w), BLOCK)
    programs = _programs(w, near, far, tiles)
    sums = torch.zeros(programs, len(c) + 1, dtype=torch.float64, device=w.device)
    with on_device(w):
        _take_out_kernel[(programs,)](
            w,
            *rows,
            c,
            out,
            sums,
            len(w),
            tiles,
            *(len(q) for q in rows),
            w.stride(0),
            *(q.stride(0) for q in rows),
            ROWS=ROWS,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return sums.sum(0)


def _programs(w: Tensor, near: Tensor, far: Tensor | None, tiles: int) -> int:
    """Number of programs: as many as have tiles that fit into the caches, and at most one per tile."""
    each = BLOCK * sum(len(q) * q.element_size() for q in (near, far) if q is not None)
    units = torch.cuda.get_device_properties(w.device).multi_processor_count if w.is_cuda else 2
    return max(1, min(tiles, units * max(MIN_PROGRAMS, min(MAX_PROGRAMS, CACHE // max(each, 1)))))
