"""Triton kernels of attention and of its derivative."""

import triton
import triton.language as tl

from curvescope.kernels.attention.triton_shared import (
    LOG2E,
    key_range,
    load_row,
    load_tile,
    query_range,
    row_block,
    seen_keys,
    store_row,
    store_tile,
    visible,
)


@triton.jit
def _forward_step(
    acc, top, total, q, k_, v_, col0, row, stop, window, scale, k_s, v_s, d, e,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    COLS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the running maximum, the sum and the product of an online softmax."""
    k = load_tile(k_, col0, stop, d, k_s, COLS, D, d == D, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
    if MASKED:
        col = col0 + tl.arange(0, COLS)
        scores = tl.where(
            visible(row[:, None], col[None, :], stop, window, CAUSAL, WINDOW), scores, float("-inf")
        )
    new = tl.maximum(top, tl.max(scores, 1))
    shift = new
    if MASKED:
        shift = tl.where(new == float("-inf"), 0.0, new)
    P = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(top - shift)
    v = load_tile(v_, col0, stop, e, v_s, COLS, E, e == E, MASKED)
    acc = tl.dot(P.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, new, total * fade + tl.sum(P, 1)


@triton.jit
def forward_kernel(
    q, k, v, o, lse, lengths, q_s, k_s, v_s, o_s, queries, keys, heads, group, window, scale,
    d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, LENGTHS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """O and LSE of one tile of queries."""
    row0 = row_block(queries, ROWS, CAUSAL)
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    stop = seen_keys(lengths, b, keys, LENGTHS)
    k_, v_ = k + b * k_s[0] + h // group * k_s[1], v + b * v_s[0] + h // group * v_s[1]
    Q = load_tile(q + b * q_s[0] + h * q_s[1], row0, queries, d, q_s[2], ROWS, D, d == D, True)
    row = row0 + tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, E], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first, whole, last = key_range(row0, stop, window, CAUSAL, WINDOW, ROWS, COLS)
    for col0 in range(first, whole, COLS):
        acc, top, total = _forward_step(
            acc, top, total, Q, k_, v_, col0, row, stop, window, scale, k_s[2], v_s[2], d, e,
            CAUSAL, WINDOW, PRECISION, COLS, D, E, False,
        )  # fmt: skip
    for col0 in range(whole, last, COLS):
        acc, top, total = _forward_step(
            acc, top, total, Q, k_, v_, col0, row, stop, window, scale, k_s[2], v_s[2], d, e,
            CAUSAL, WINDOW, PRECISION, COLS, D, E, True,
        )  # fmt: skip
    empty = total == 0.0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    store_tile(o + b * o_s[0] + h * o_s[1], out, row0, queries, e, o_s[2], ROWS, E)
    L = tl.where(empty, float("inf"), (top + tl.log2(tl.where(empty, 1.0, total))) / LOG2E)
    store_row(lse + (b * heads + h) * queries, L, row0, queries, ROWS)


@triton.jit
def _dq_step(
    acc, q, do, lse2, delta, k_, v_, col0, row, stop, window, scale, k_s, v_s, d, e,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    COLS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k = load_tile(k_, col0, stop, d, k_s, COLS, D, d == D, MASKED)
    v = load_tile(v_, col0, stop, e, v_s, COLS, E, e == E, MASKED)
    P = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E) - lse2[:, None])
    if MASKED:
        col = col0 + tl.arange(0, COLS)
        P = tl.where(visible(row[:, None], col[None, :], stop, window, CAUSAL, WINDOW), P, 0.0)
    dS = P * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    return tl.dot(dS.to(k.dtype), k, acc, input_precision=PRECISION)


@triton.jit
def dq_kernel(
    q, k, v, o, do, lse, dq, delta, lengths, q_s, k_s, v_s, o_s, do_s, dq_s,
    queries, keys, heads, group, window, scale,
    d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, LENGTHS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, and its row statistic Σ dO∘O, which `dkv_kernel` needs."""
    row0 = row_block(queries, ROWS, CAUSAL)
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    stop = seen_keys(lengths, b, keys, LENGTHS)
    stats = (b * heads + h) * queries
    k_, v_ = k + b * k_s[0] + h // group * k_s[1], v + b * v_s[0] + h // group * v_s[1]
    out = load_tile(o + b * o_s[0] + h * o_s[1], row0, queries, e, o_s[2], ROWS, E, e == E, True)
    dO = load_tile(do + b * do_s[0] + h * do_s[1], row0, queries, e, do_s[2], ROWS, E, e == E, True)
    rowsum = tl.sum(out.to(tl.float32) * dO.to(tl.float32), 1)
    store_row(delta + stats, rowsum, row0, queries, ROWS)
    Q = load_tile(q + b * q_s[0] + h * q_s[1], row0, queries, d, q_s[2], ROWS, D, d == D, True)
    lse2 = load_row(lse + stats, row0, queries, float("inf"), ROWS) * LOG2E
    row = row0 + tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, D], tl.float32)
    first, whole, last = key_range(row0, stop, window, CAUSAL, WINDOW, ROWS, COLS)
    for col0 in range(first, whole, COLS):
        acc = _dq_step(
            acc, Q, dO, lse2, rowsum, k_, v_, col0, row, stop, window, scale, k_s[2], v_s[2], d, e,
            CAUSAL, WINDOW, PRECISION, COLS, D, E, False,
        )  # fmt: skip
    for col0 in range(whole, last, COLS):
        acc = _dq_step(
            acc, Q, dO, lse2, rowsum, k_, v_, col0, row, stop, window, scale, k_s[2], v_s[2], d, e,
            CAUSAL, WINDOW, PRECISION, COLS, D, E, True,
        )  # fmt: skip
    store_tile(dq + b * dq_s[0] + h * dq_s[1], acc * scale, row0, queries, d, dq_s[2], ROWS, D)


@triton.jit
def _dkv_step(
    dK, dV, k, v, q_, do_, lse_, delta_, row0, col, stop, queries, window, scale, q_s, do_s, d, e,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of queries. Scores are transposed (keys, queries), so that they are left factors."""
    q = load_tile(q_, row0, queries, d, q_s, ROWS, D, d == D, True)
    do = load_tile(do_, row0, queries, e, do_s, ROWS, E, e == E, True)
    lse2 = load_row(lse_, row0, queries, float("inf"), ROWS) * LOG2E
    delta = load_row(delta_, row0, queries, 0.0, ROWS)
    P = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E) - lse2[None, :])
    if MASKED:
        row = row0 + tl.arange(0, ROWS)
        P = tl.where(visible(row[None, :], col[:, None], stop, window, CAUSAL, WINDOW), P, 0.0)
    dV = tl.dot(P.to(do.dtype), do, dV, input_precision=PRECISION)
    dS = P * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
    return tl.dot(dS.to(q.dtype), q, dK, input_precision=PRECISION), dV


@triton.jit
def dkv_kernel(
    q, k, v, do, lse, delta, dk, dv, lengths, q_s, k_s, v_s, do_s, dk_s, dv_s,
    queries, keys, heads, group, window, scale,
    d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, LENGTHS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, summed over the query heads that use them."""
    col0 = tl.program_id(0) * COLS
    pairs = heads // group
    b, g = (tl.program_id(1) // pairs).to(tl.int64), (tl.program_id(1) % pairs).to(tl.int64)
    stop = seen_keys(lengths, b, keys, LENGTHS)
    K = load_tile(k + b * k_s[0] + g * k_s[1], col0, keys, d, k_s[2], COLS, D, d == D, True)
    V = load_tile(v + b * v_s[0] + g * v_s[1], col0, keys, e, v_s[2], COLS, E, e == E, True)
    col = col0 + tl.arange(0, COLS)
    dK = tl.zeros([COLS, D], tl.float32)
    dV = tl.zeros([COLS, E], tl.float32)
    first, whole, last = query_range(col0, stop, queries, window, CAUSAL, WINDOW, ROWS, COLS)
    for member in range(group):
        h = g * group + member
        q_, do_ = q + b * q_s[0] + h * q_s[1], do + b * do_s[0] + h * do_s[1]
        stats = (b * heads + h) * queries
        for row0 in range(first, whole, ROWS):
            dK, dV = _dkv_step(
                dK, dV, K, V, q_, do_, lse + stats, delta + stats, row0, col, stop, queries, window, scale,
                q_s[2], do_s[2], d, e, CAUSAL, WINDOW, PRECISION, ROWS, D, E, True,
            )  # fmt: skip
        for row0 in range(whole, last, ROWS):
            dK, dV = _dkv_step(
                dK, dV, K, V, q_, do_, lse + stats, delta + stats, row0, col, stop, queries, window, scale,
                q_s[2], do_s[2], d, e, CAUSAL, WINDOW, PRECISION, ROWS, D, E, False,
            )  # fmt: skip
    store_tile(dk + b * dk_s[0] + g * dk_s[1], dK * scale, col0, keys, d, dk_s[2], COLS, D)
    store_tile(dv + b * dv_s[0] + g * dv_s[1], dV, col0, keys, e, dv_s[2], COLS, E)
