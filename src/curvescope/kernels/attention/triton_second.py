"""Triton kernels of the second derivative of attention, for directions gQ, gK, gV.

With w̄ = Σ_j P∘W and c = Σ_v dO∘h_dO, the score cotangent is Γ = dS∘(W − w̄) + P∘(dO gVᵀ − c): the first
kernel makes h_dO and the two row statistics, the second hQ, the third hK and hV. (c = Σ_j dP∘Ṗ + P∘(dO gVᵀ),
summed over the keys with h_dO = Ṗ V + P gV, so the first kernel needs no products with dO.)
"""

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
def _ho_step(
    acc, mean, q, gq, lse2, k_, gk_, v_, gv_, col0, row, stop, window, scale, k_s, gk_s, v_s, gv_s, d, e,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GQ: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr,
    PRECISION: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k = load_tile(k_, col0, stop, d, k_s, COLS, D, d == D, MASKED)
    P = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E) - lse2[:, None])
    if MASKED:
        col = col0 + tl.arange(0, COLS)
        P = tl.where(visible(row[:, None], col[None, :], stop, window, CAUSAL, WINDOW), P, 0.0)
    if GQ or GK:
        W = tl.zeros_like(P)
        if GQ:
            W = tl.dot(gq, tl.trans(k), W, input_precision=PRECISION)
        if GK:
            gk = load_tile(gk_, col0, stop, d, gk_s, COLS, D, d == D, MASKED)
            W = tl.dot(q, tl.trans(gk), W, input_precision=PRECISION)
        PW = P * (W * scale)
        mean += tl.sum(PW, 1)
        v = load_tile(v_, col0, stop, e, v_s, COLS, E, e == E, MASKED)
        acc = tl.dot(PW.to(v.dtype), v, acc, input_precision=PRECISION)
    if GV:
        gv = load_tile(gv_, col0, stop, e, gv_s, COLS, E, e == E, MASKED)
        acc = tl.dot(P.to(gv.dtype), gv, acc, input_precision=PRECISION)
    return acc, mean


@triton.jit
def ho_kernel(
    q, k, v, o, do, lse, gq, gk, gv, ho, mean, cross, delta, lengths,
    q_s, k_s, v_s, o_s, do_s, gq_s, gk_s, gv_s, ho_s, queries, keys, heads, group, window, scale,
    d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, LENGTHS: tl.constexpr,
    GQ: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr, STATS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """h_dO of one tile of queries and, if STATS, w̄, c and D = Σ_v dO∘O of its rows."""
    row0 = row_block(queries, ROWS, CAUSAL)
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    n = tl.program_id(2).to(tl.int64)
    stop = seen_keys(lengths, b, keys, LENGTHS)
    stats = (b * heads + h) * queries
    g = h // group
    k_, v_ = k + b * k_s[0] + g * k_s[1], v + b * v_s[0] + g * v_s[1]
    gk_ = gk + n * gk_s[0] + b * gk_s[1] + g * gk_s[2]
    gv_ = gv + n * gv_s[0] + b * gv_s[1] + g * gv_s[2]
    Q = load_tile(q + b * q_s[0] + h * q_s[1], row0, queries, d, q_s[2], ROWS, D, d == D, True)
    gQ = Q
    if GQ:
        gq_ = gq + n * gq_s[0] + b * gq_s[1] + h * gq_s[2]
        gQ = load_tile(gq_, row0, queries, d, gq_s[3], ROWS, D, d == D, True)
    lse2 = load_row(lse + stats, row0, queries, float("inf"), ROWS) * LOG2E
    row = row0 + tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, E], tl.float32)
    w = tl.zeros([ROWS], tl.float32)
    first, whole, last = key_range(row0, stop, window, CAUSAL, WINDOW, ROWS, COLS)
    for col0 in range(first, whole, COLS):
        acc, w = _ho_step(
            acc, w, Q, gQ, lse2, k_, gk_, v_, gv_, col0, row, stop, window, scale,
            k_s[2], gk_s[3], v_s[2], gv_s[3], d, e,
            CAUSAL, WINDOW, GQ, GK, GV, PRECISION, COLS, D, E, False,
        )  # fmt: skip
    for col0 in range(whole, last, COLS):
        acc, w = _ho_step(
            acc, w, Q, gQ, lse2, k_, gk_, v_, gv_, col0, row, stop, window, scale,
            k_s[2], gk_s[3], v_s[2], gv_s[3], d, e,
            CAUSAL, WINDOW, GQ, GK, GV, PRECISION, COLS, D, E, True,
        )  # fmt: skip
    out = load_tile(o + b * o_s[0] + h * o_s[1], row0, queries, e, o_s[2], ROWS, E, e == E, True).to(
        tl.float32
    )
    acc = acc - w[:, None] * out
    store_tile(ho + n * ho_s[0] + b * ho_s[1] + h * ho_s[2], acc, row0, queries, e, ho_s[3], ROWS, E)
    if STATS:
        dO = load_tile(do + b * do_s[0] + h * do_s[1], row0, queries, e, do_s[2], ROWS, E, e == E, True)
        dO = dO.to(tl.float32)
        moved = n * (tl.num_programs(1) * queries) + stats
        store_row(mean + moved, w, row0, queries, ROWS)
        store_row(cross + moved, tl.sum(dO * acc, 1), row0, queries, ROWS)
        store_row(delta + stats, tl.sum(dO * out, 1), row0, queries, ROWS)


@triton.jit
def _hq_step(
    acc, q, gq, do, lse2, mean, cross, delta, k_, gk_, v_, gv_, col0, row, stop, window, scale,
    k_s, gk_s, v_s, gv_s, d, e,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GQ: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr,
    PRECISION: tl.constexpr, COLS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k = load_tile(k_, col0, stop, d, k_s, COLS, D, d == D, MASKED)
    P = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E) - lse2[:, None])
    if MASKED:
        col = col0 + tl.arange(0, COLS)
        P = tl.where(visible(row[:, None], col[None, :], stop, window, CAUSAL, WINDOW), P, 0.0)
    v = load_tile(v_, col0, stop, e, v_s, COLS, E, e == E, MASKED)
    dS = P * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
    turn = tl.zeros_like(P) - cross[:, None]
    if GV:
        gv = load_tile(gv_, col0, stop, e, gv_s, COLS, E, e == E, MASKED)
        turn = tl.dot(do, tl.trans(gv), turn, input_precision=PRECISION)
    gamma = P * turn
    if GQ or GK:
        W = tl.zeros_like(P)
        if GQ:
            W = tl.dot(gq, tl.trans(k), W, input_precision=PRECISION)
        if GK:
            gk = load_tile(gk_, col0, stop, d, gk_s, COLS, D, d == D, MASKED)
            W = tl.dot(q, tl.trans(gk), W, input_precision=PRECISION)
            acc = tl.dot(dS.to(gk.dtype), gk, acc, input_precision=PRECISION)
        gamma += dS * (W * scale - mean[:, None])
    return tl.dot(gamma.to(k.dtype), k, acc, input_precision=PRECISION)


@triton.jit
def hq_kernel(
    q, k, v, do, lse, gq, gk, gv, mean, cross, delta, hq, lengths,
    q_s, k_s, v_s, do_s, gq_s, gk_s, gv_s, hq_s, queries, keys, heads, group, window, scale,
    d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, LENGTHS: tl.constexpr,
    GQ: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """hQ of one tile of queries."""
    row0 = row_block(queries, ROWS, CAUSAL)
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    n = tl.program_id(2).to(tl.int64)
    stop = seen_keys(lengths, b, keys, LENGTHS)
    stats = (b * heads + h) * queries
    moved = n * (tl.num_programs(1) * queries) + stats
    g = h // group
    k_, v_ = k + b * k_s[0] + g * k_s[1], v + b * v_s[0] + g * v_s[1]
    gk_ = gk + n * gk_s[0] + b * gk_s[1] + g * gk_s[2]
    gv_ = gv + n * gv_s[0] + b * gv_s[1] + g * gv_s[2]
    Q = load_tile(q + b * q_s[0] + h * q_s[1], row0, queries, d, q_s[2], ROWS, D, d == D, True)
    dO = load_tile(do + b * do_s[0] + h * do_s[1], row0, queries, e, do_s[2], ROWS, E, e == E, True)
    gQ = Q
    if GQ:
        gq_ = gq + n * gq_s[0] + b * gq_s[1] + h * gq_s[2]
        gQ = load_tile(gq_, row0, queries, d, gq_s[3], ROWS, D, d == D, True)
    lse2 = load_row(lse + stats, row0, queries, float("inf"), ROWS) * LOG2E
    w = load_row(mean + moved, row0, queries, 0.0, ROWS)
    c = load_row(cross + moved, row0, queries, 0.0, ROWS)
    D_ = load_row(delta + stats, row0, queries, 0.0, ROWS)
    row = row0 + tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, D], tl.float32)
    first, whole, last = key_range(row0, stop, window, CAUSAL, WINDOW, ROWS, COLS)
    for col0 in range(first, whole, COLS):
        acc = _hq_step(
            acc, Q, gQ, dO, lse2, w, c, D_, k_, gk_, v_, gv_, col0, row, stop, window, scale,
            k_s[2], gk_s[3], v_s[2], gv_s[3], d, e,
            CAUSAL, WINDOW, GQ, GK, GV, PRECISION, COLS, D, E, False,
        )  # fmt: skip
    for col0 in range(whole, last, COLS):
        acc = _hq_step(
            acc, Q, gQ, dO, lse2, w, c, D_, k_, gk_, v_, gv_, col0, row, stop, window, scale,
            k_s[2], gk_s[3], v_s[2], gv_s[3], d, e,
            CAUSAL, WINDOW, GQ, GK, GV, PRECISION, COLS, D, E, True,
        )  # fmt: skip
    store_tile(hq + n * hq_s[0] + b * hq_s[1] + h * hq_s[2], acc * scale, row0, queries, d, hq_s[3], ROWS, D)


@triton.jit
def _hkv_step(
    hK, hV, k, gk, v, gv, q_, gq_, do_, lse_, mean_, cross_, delta_, row0, col, stop, queries, window, scale,
    q_s, gq_s, do_s, d, e,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GQ: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of queries. Scores are transposed (keys, queries), so that they are left factors."""
    q = load_tile(q_, row0, queries, d, q_s, ROWS, D, d == D, True)
    lse2 = load_row(lse_, row0, queries, float("inf"), ROWS) * LOG2E
    P = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E) - lse2[None, :])
    if MASKED:
        row = row0 + tl.arange(0, ROWS)
        P = tl.where(visible(row[None, :], col[:, None], stop, window, CAUSAL, WINDOW), P, 0.0)
    do = load_tile(do_, row0, queries, e, do_s, ROWS, E, e == E, True)
    delta = load_row(delta_, row0, queries, 0.0, ROWS)
    dS = P * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
    turn = tl.zeros_like(P) - load_row(cross_, row0, queries, 0.0, ROWS)[None, :]
    if GV:
        turn = tl.dot(gv, tl.trans(do), turn, input_precision=PRECISION)
    gamma = P * turn
    if GQ or GK:
        W = tl.zeros_like(P)
        if GQ:
            gq = load_tile(gq_, row0, queries, d, gq_s, ROWS, D, d == D, True)
            W = tl.dot(k, tl.trans(gq), W, input_precision=PRECISION)
            hK = tl.dot(dS.to(gq.dtype), gq, hK, input_precision=PRECISION)
        if GK:
            W = tl.dot(gk, tl.trans(q), W, input_precision=PRECISION)
        W = W * scale - load_row(mean_, row0, queries, 0.0, ROWS)[None, :]
        gamma += dS * W
        hV = tl.dot((P * W).to(do.dtype), do, hV, input_precision=PRECISION)
    return tl.dot(gamma.to(q.dtype), q, hK, input_precision=PRECISION), hV


@triton.jit
def hkv_kernel(
    q, k, v, do, lse, gq, gk, gv, mean, cross, delta, hk, hv, lengths,
    q_s, k_s, v_s, do_s, gq_s, gk_s, gv_s, hk_s, hv_s, queries, keys, heads, group, window, scale,
    d: tl.constexpr, e: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, LENGTHS: tl.constexpr,
    GQ: tl.constexpr, GK: tl.constexpr, GV: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """hK and hV of one tile of keys, summed over the query heads that use them."""
    col0 = tl.program_id(0) * COLS
    pairs = heads // group
    b, g = (tl.program_id(1) // pairs).to(tl.int64), (tl.program_id(1) % pairs).to(tl.int64)
    n = tl.program_id(2).to(tl.int64)
    stop = seen_keys(lengths, b, keys, LENGTHS)
    K = load_tile(k + b * k_s[0] + g * k_s[1], col0, keys, d, k_s[2], COLS, D, d == D, True)
    V = load_tile(v + b * v_s[0] + g * v_s[1], col0, keys, e, v_s[2], COLS, E, e == E, True)
    gK, gV = K, V
    if GK:
        gK = load_tile(
            gk + n * gk_s[0] + b * gk_s[1] + g * gk_s[2], col0, keys, d, gk_s[3], COLS, D, d == D, True
        )
    if GV:
        gV = load_tile(
            gv + n * gv_s[0] + b * gv_s[1] + g * gv_s[2], col0, keys, e, gv_s[3], COLS, E, e == E, True
        )
    col = col0 + tl.arange(0, COLS)
    hK = tl.zeros([COLS, D], tl.float32)
    hV = tl.zeros([COLS, E], tl.float32)
    first, whole, last = query_range(col0, stop, queries, window, CAUSAL, WINDOW, ROWS, COLS)
    for member in range(group):
        h = g * group + member
        stats = (b * heads + h) * queries
        moved = n * (tl.num_programs(1) * group * queries) + stats
        q_, do_ = q + b * q_s[0] + h * q_s[1], do + b * do_s[0] + h * do_s[1]
        gq_ = gq + n * gq_s[0] + b * gq_s[1] + h * gq_s[2]
        for row0 in range(first, whole, ROWS):
            hK, hV = _hkv_step(
                hK, hV, K, gK, V, gV, q_, gq_, do_, lse + stats, mean + moved, cross + moved, delta + stats,
                row0, col, stop, queries, window, scale, q_s[2], gq_s[3], do_s[2], d, e,
                CAUSAL, WINDOW, GQ, GK, GV, PRECISION, ROWS, D, E, True,
            )  # fmt: skip
        for row0 in range(whole, last, ROWS):
            hK, hV = _hkv_step(
                hK, hV, K, gK, V, gV, q_, gq_, do_, lse + stats, mean + moved, cross + moved, delta + stats,
                row0, col, stop, queries, window, scale, q_s[2], gq_s[3], do_s[2], d, e,
                CAUSAL, WINDOW, GQ, GK, GV, PRECISION, ROWS, D, E, False,
            )  # fmt: skip
    store_tile(hk + n * hk_s[0] + b * hk_s[1] + g * hk_s[2], hK * scale, col0, keys, d, hk_s[3], COLS, D)
    store_tile(hv + n * hv_s[0] + b * hv_s[1] + g * hv_s[2], hV, col0, keys, e, hv_s[3], COLS, E)
