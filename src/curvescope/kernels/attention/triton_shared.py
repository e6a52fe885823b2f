"""Functions that the Triton kernels of attention share: tiles in and out, visible keys, weights from LSE.

Tensors are (B, H, L, d) with any strides but the last, which is 1. Offsets are 64-bit, since B·H·L·d may pass
2³¹. Sizes of tiles are powers of two of 16 at least; the last axis is padded to such a size.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
    base,
    start,
    length,
    size,
    stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    EVEN: tl.constexpr,
    BOUND: tl.constexpr,
):
    """ROWS rows from `start` of one head; zeros after `length` (if BOUND) and `size` (unless EVEN)."""
    rows = start + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    at = base + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    if BOUND:
        if EVEN:
            tile = tl.load(at, mask=rows[:, None] < length, other=0.0)
        else:
            tile = tl.load(at, mask=(rows[:, None] < length) & (cols[None, :] < size), other=0.0)
    else:
        if EVEN:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=cols[None, :] < size, other=0.0)
    return tile


@triton.jit
def store_tile(base, tile, start, length, size, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Write ROWS rows from `start` of one head, as far as `length` and `size`."""
    rows = start + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    at = base + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=(rows[:, None] < length) & (cols[None, :] < size))


@triton.jit
def load_row(base, start, length, other, ROWS: tl.constexpr):
    """One number per row; `other` after `length`."""
    rows = start + tl.arange(0, ROWS)
    return tl.load(base + rows, mask=rows < length, other=other)


@triton.jit
def store_row(base, row, start, length, ROWS: tl.constexpr):
    """Write one number per row, as far as `length`."""
    rows = start + tl.arange(0, ROWS)
    tl.store(base + rows, row, mask=rows < length)


@triton.jit
def visible(row, col, stop, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return True if the query at `row` sees the key at `col`; they are broadcast against each other."""
    seen = col < stop
    if CAUSAL:
        seen = seen & (col <= row)
    if WINDOW:
        seen = seen & (col > row - window)
    return seen


@triton.jit
def key_range(
    row0, stop, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """First key, first key of a tile that needs a mask, and last key (excluded) of a tile of queries."""
    first = 0 * stop
    last = stop
    whole = stop // COLS * COLS
    if CAUSAL:
        last = tl.minimum(stop, row0 + ROWS)
        whole = tl.minimum(whole, (row0 + 1) // COLS * COLS)
    if WINDOW:
        first = tl.maximum(row0 - window + 1, 0) // COLS * COLS
        whole = first
    return first, whole, last


@triton.jit
def query_range(
    col0,
    stop,
    queries,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """First query, first query of a tile that needs no mask, and last query (excluded) of a tile of keys."""
    first = 0 * stop
    last = queries
    if CAUSAL:
        first = col0 // ROWS * ROWS
    if WINDOW:
        last = tl.minimum(queries, col0 + COLS - 1 + window)
    last = tl.where(col0 < stop, last, first)
    whole = first
    if CAUSAL:
        whole = tl.minimum((col0 + COLS - 1 + ROWS - 1) // ROWS * ROWS, last)
    whole = tl.where(col0 + COLS > stop, last, whole)
    if WINDOW:
        whole = last
    return first, whole, last


@triton.jit
def seen_keys(lengths, b, keys, LENGTHS: tl.constexpr):
    """Number of keys that batch entry b has."""
    stop = keys
    if LENGTHS:
        stop = tl.minimum(tl.load(lengths + b).to(tl.int32), keys)
    return stop


@triton.jit
def row_block(queries, ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    """First query of this program; the longest rows come first."""
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block
    return block * ROWS
