"""Attention, its derivative and its second derivative by tiles of the score matrix, in plain torch.

With P = softmax(s·QKᵀ) recomputed from the row statistic LSE, D = Σ dO∘O and dS = P∘(dO Vᵀ − D), the second
derivative in directions gQ, gK, gV is

    W = s·(gQ Kᵀ + Q gKᵀ),  Ẇ = W − Σ_j P∘W,  Ṗ = P∘Ẇ,  X = dS∘Ẇ + P∘(dO gVᵀ),  Γ = X − P·Σ_j X,
    hQ = s·(Γ K + dS gK),  hK = s·(Γᵀ Q + dSᵀ gQ),  hV = Ṗᵀ dO,  h_dO = Ṗ V + P gV,

where sums over j are sums of rows. h_dO is the forward-mode derivative of attention. A bias of the scores has
the derivatives dS and Γ, and its direction is added to W. Dropout multiplies P by Z where it meets V or dO.
The query heads of one key head are stacked along the rows of a tile, so that keys and values are never
repeated.

The forward-mode derivative of h_dO, in directions t and s, is

    Y = Ẇ_t∘Ẇ_s + s·(t_Q s_Kᵀ + s_Q t_Kᵀ),  P̈ = P∘(Y − Σ_j P∘Y),  P̈ V + Ṗ_t s_V + Ṗ_s t_V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvescope.kernels.attention.mask import Mask, Tile, cut, num_scores
from curvescope.kernels.attention.passes import Directions, Needs, Outputs, Saved
from curvescope.kernels.attention.score_modifiers import Extras, Pair

TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # of the scores of one tile
CAUSAL_ROWS = {"cpu": 64, "cuda": 512}  # most rows of a causal tile: smaller tiles skip more hidden keys
KEEP_BYTES = 32 << 20  # P and dS are cached between the passes if each is smaller; CPU only
TOGETHER, TOGETHER_BYTES = 4, 256 << 10  # limits for several directions in one call


@dataclass(frozen=True)
class Plan:
    """Tiles of one call, and its tensors as (B·Hkv, group, length, size)."""

    tiles: list[Tile]
    lengths: Tensor | None  # (B·Hkv,)
    mask: Mask
    scale: float
    heads: int
    group: int
    empties: bool  # True if a row may have no visible key
    extras: Extras | None

    def kept(self, tile: Tile, like: Tensor) -> Tensor | None:
        """Z of one tile; None without dropout."""
        return None if self.extras is None else self.extras.kept(tile, like)

    def split(self, x: Tensor) -> Tensor:
        """(B, H, L, d) as (B·Hkv, group, L, d); half precision is computed in single."""
        x = x.reshape(self.heads, -1, *x.shape[2:])
        return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x

    def small(self, q: Tensor, num: int) -> bool:
        """Return True if the scores of `num` directions cost more calls than arithmetic."""
        return len(self.tiles) == 1 and num * num_scores(self.tiles) * q.element_size() <= TOGETHER_BYTES


def plan(q: Tensor, k: Tensor, mask: Mask, scale: float, extras: Extras | None = None) -> Plan:
    """Return the tiles of one call, the same for the three functions below, so that cached tiles match."""
    heads, group = k.shape[0] * k.shape[1], q.shape[1] // k.shape[1]
    queries, keys = q.shape[2], k.shape[2]
    device = "cpu" if q.device.type == "cpu" else "cuda"
    rows, scores = (
        CAUSAL_ROWS[device] if mask.causal or mask.window is not None else queries,
        TILE_BYTES[device] // max(4, q.element_size()),
    )
    tiles = cut(
        mask, heads=heads, group=group, queries=queries, keys=keys, row_count=rows, tile_scores=scores
    )
    lengths = None if mask.lengths is None else mask.lengths.to(q.device).repeat_interleave(k.shape[1])
    empties = mask.empties(queries, keys) or (extras is not None and extras.empties)
    return Plan(tiles, lengths, mask, scale, heads, group, empties, extras)


def worth_keeping(q: Tensor, k: Tensor) -> bool:
    """Return True if P and dS are small enough to be cached for later passes."""
    size = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.element_size()
    return q.device.type == "cpu" and size <= KEEP_BYTES and q.element_size() >= 4


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float,
    keep: bool = False,
    extras: Extras | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """O, LSE (+∞ where no key is seen), and P tile after tile, empty unless `keep`."""
    cuts = plan(q, k, mask, scale, extras)
    Q, K, V = cuts.split(q), cuts.split(k), cuts.split(v)
    out, LSE = Q.new_empty(*Q.shape[:3], V.shape[3]), Q.new_empty(Q.shape[:3])
    if cuts.empties:
        out, LSE = out.zero_(), LSE.fill_(torch.inf)
    kept = Q.new_empty(num_scores(cuts.tiles) if keep else 0)
    for tile in cuts.tiles:
        scores = _scores(cuts, tile, _rows(Q, tile), _cols(K, tile))
        top = scores.amax(-1)
        P = torch.softmax(scores, -1, out=tile.view(kept) if keep else scores)
        lse = top - P.amax(-1).log_()
        if cuts.empties:
            empty = top == -torch.inf
            P.masked_fill_(empty[..., None], 0)
            lse.masked_fill_(empty, torch.inf)
        _put(out, tile, _times(P, cuts.kept(tile, P)), _cols(V, tile))
        part = LSE[tile.heads, :, tile.rows]
        part.copy_(lse.view(part.shape))
    return _shaped(out, *q.shape[:3], v.shape[3]).to(q.dtype), _shaped(LSE, *q.shape[:3]), kept


def backward(
    saved: Saved,
    do: Tensor,
    *,
    mask: Mask,
    scale: float,
    keep: bool = False,
    extras: Extras | None = None,
    into: Pair = (None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV for an incoming dO, and dS tile after tile, empty unless `keep`.

    The derivatives in bias and table are added to `into`.
    """
    q, k, v, o, lse, kept_P = saved.q, saved.k, saved.v, saved.o, saved.lse, saved.P
    cuts = plan(q, k, mask, scale, extras)
    Q, K, V, dO = cuts.split(q), cuts.split(k), cuts.split(v), cuts.split(do)
    stats, D = cuts.split(lse), (dO * cuts.split(o)).sum(-1)
    dQ, dK, dV = Q.new_empty(Q.shape), K.new_zeros(K.shape), V.new_zeros(V.shape)
    dQ = dQ.zero_() if cuts.empties else dQ
    kept = Q.new_empty(num_scores(cuts.tiles) if keep else 0)
    for tile in cuts.tiles:
        q_, k_, dO_ = _rows(Q, tile), _cols(K, tile), _rows(dO, tile)
        P = _weights(cuts, tile, q_, k_, stats, kept_P)
        Z = cuts.kept(tile, P)
        dS = _weight_gradients(D, tile, dO_, _cols(V, tile), Z)
        dS = torch.mul(dS, P, out=tile.view(kept) if keep else dS)
        _put(dQ, tile, dS, k_, scale)
        _add(dK, tile, dS, q_, scale)
        _add(dV, tile, _times(P, Z), dO_)
        if extras is not None:
            extras.collect(into, dS, tile)
    return _like(dQ, q), _like(dK, k), _like(dV, v), kept


def second(
    saved: Saved,
    do: Tensor | None,
    dS: Tensor,
    directions: Directions,
    *,
    mask: Mask,
    scale: float,
    needs: Needs,
    extras: Extras | None = None,
    moves: Pair = (None, None),
    into: Pair = (None, None),
) -> Outputs:
    """hQ, hK, hV, h_dO for n directions (n, B, H, L, d); None where `needs` says so.

    Without dO only h_dO is possible. A direction that is None counts as zero. `moves` are directions of bias
    and table (n, b, h, …), and the derivatives in these are added to `into`, of the same shapes.
    """
    q, k, v, o, lse, kept_P = saved.q, saved.k, saved.v, saved.o, saved.lse, saved.P
    cuts = plan(q, k, mask, scale, extras)
    num = next(g.shape[0] for g in (*directions, *moves) if g is not None)
    if extras is None and num >= TOGETHER and cuts.small(q, num):
        return _together(num, saved, do, dS, directions, mask=mask.repeated(num), scale=scale, needs=needs)
    Q, K, V, stats = cuts.split(q), cuts.split(k), cuts.split(v), cuts.split(lse)
    wanted = any(needs[:3]) or any(x is not None for x in into)
    dO = None if do is None or not wanted else cuts.split(do)
    D = None if dO is None or dS.numel() else (dO * cuts.split(o)).sum(-1)
    each = [[None if g is None else cuts.split(g[j]) for g in directions] for j in range(num)]
    sizes = (Q.shape, K.shape, V.shape, (*Q.shape[:3], V.shape[3]))
    results = [Q.new_zeros(num, *size) if need else None for size, need in zip(sizes, needs, strict=True)]
    for tile in cuts.tiles:
        q_, k_, v_ = _rows(Q, tile), _cols(K, tile), _cols(V, tile)
        P, dS_, dO_ = _weights(cuts, tile, q_, k_, stats, kept_P), None, None
        Z = cuts.kept(tile, P)
        if dO is not None:
            dO_ = _rows(dO, tile)
            dS_ = tile.view(dS) if D is None else _weight_gradients(D, tile, dO_, v_, Z).mul_(P)
        shared = _Shared(tile, scale, q_, k_, v_, dO_, P, dS_, Z)
        for j in range(num):
            more = None if extras is None else extras.tangent(tile, _at(moves, j), P)
            X = _add_direction(shared, each[j], [None if x is None else x[j] for x in results], more)
            if extras is not None and X is not None:
                extras.collect(_at(into, j), X, tile)
    pairs = zip(results, (q, k, v, o), strict=True)
    hq, hk, hv, ho = (None if x is None else _like(x, like, num) for x, like in pairs)
    return hq, hk, hv, ho


def second_tangent(
    saved: Saved,
    t: Directions,
    s: Directions,
    *,
    mask: Mask,
    scale: float,
    extras: Extras | None = None,
    moves: tuple[Pair, Pair] = ((None, None), (None, None)),
) -> Tensor:
    """The second derivative of O in directions t and s of q, k, v (B, H, L, d), bias and table."""
    q, k, v = saved.q, saved.k, saved.v
    cuts = plan(q, k, mask, scale, extras)
    Q, K, V, stats = cuts.split(q), cuts.split(k), cuts.split(v), cuts.split(saved.lse)
    each = [[None if g is None else cuts.split(g) for g in directions] for directions in (t, s)]
    out = Q.new_zeros(*Q.shape[:3], V.shape[3])
    for tile in cuts.tiles:
        q_, k_, v_ = _rows(Q, tile), _cols(K, tile), _cols(V, tile)
        P = _weights(cuts, tile, q_, k_, stats, saved.P)
        shared, Z = _Shared(tile, scale, q_, k_, v_, None, P, None, None), cuts.kept(tile, P)
        W, turned = [], []
        for directions, pair in zip(each, moves, strict=True):
            gQ, gK, gV = _of_tile(directions, tile)
            more = None if extras is None else extras.tangent(tile, pair, P)
            raw = _plus(_tangent_scores(shared, gQ, gK), more)
            W.append(None if raw is None else raw - (P * raw).sum(-1, keepdim=True))
            turned.append((gQ, gK, gV))
        Y = None if W[0] is None or W[1] is None else W[0] * W[1]
        (tQ, tK, tV), (sQ, sK, sV) = turned
        for a, b in ((tQ, sK), (sQ, tK)):
            if a is not None and b is not None:
                Y = _plus(Y, torch.bmm(a * scale, b.mT))
        if Y is not None:
            _put(out, tile, _times(P * (Y - (P * Y).sum(-1, keepdim=True)), Z), v_, add=True)
        for w, gV in ((W[0], sV), (W[1], tV)):
            _put(out, tile, None if w is None else _times(P * w, Z), gV, add=True)
    return _like(out, saved.o)


def _together(
    num: int, saved: Saved, do: Tensor | None, dS: Tensor, directions: Directions, **options: Any
) -> Outputs:
    """`num` directions as one direction of `num` copies of the batch: on a CPU the same bits."""

    def copies(x: Tensor) -> Tensor:
        return x.repeat(num, *(1,) * (x.dim() - 1))

    again = Saved(*map(copies, (saved.q, saved.k, saved.v, saved.o, saved.lse, saved.P)))
    gq, gk, gv = (None if g is None else g.flatten(0, 1)[None] for g in directions)
    results = second(again, None if do is None else copies(do), copies(dS), (gq, gk, gv), **options)
    pairs = zip(results, (saved.q, saved.k, saved.v, saved.o), strict=True)
    hq, hk, hv, ho = (None if x is None else _shaped(x, num, *like.shape) for x, like in pairs)
    return hq, hk, hv, ho


@dataclass(frozen=True)
class _Shared:
    """Tensors of one tile that all directions use."""

    tile: Tile
    scale: float
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None
    P: Tensor
    dS: Tensor | None
    Z: Tensor | None


def _add_direction(
    at: _Shared, move: list[Tensor | None], into: list[Tensor | None], more: Tensor | None
) -> Tensor | None:
    """Add one tile's part for one direction to hQ, hK, hV, h_dO; return Γ if it was made."""
    gQ, gK, gV = _of_tile(move, at.tile)
    W = _plus(_tangent_scores(at, gQ, gK), more)
    dotP = None
    if W is not None:
        dotP = at.P * W
        mean = dotP.sum(-1, keepdim=True)
        dotP.addcmul_(at.P, mean, value=-1)
        W.sub_(mean)
        dotP = _times(dotP, at.Z)
    hQ, hK, hV, hO = into
    if hO is not None:
        _put(hO, at.tile, dotP, at.v)
        _put(hO, at.tile, None if gV is None else _times(at.P, at.Z), gV, add=True)
    if at.dS is None or at.do is None:
        return None
    if hV is not None:
        _add(hV, at.tile, dotP, at.do)
    N = None if gV is None else torch.bmm(at.do, gV.mT)
    X = _score_cotangent(at.P, at.dS, W, N if N is None or at.Z is None else N.mul_(at.Z))
    if hQ is not None:
        _put(hQ, at.tile, X, at.k, at.scale)
        _put(hQ, at.tile, at.dS, gK, at.scale, add=True)
    if hK is not None:
        _add(hK, at.tile, X, at.q, at.scale)
        _add(hK, at.tile, at.dS, gQ, at.scale)
    return X


def _of_tile(move: list[Tensor | None], tile: Tile) -> Directions:
    """A tile's rows of gQ and keys of gK and gV."""
    gQ, gK, gV = move
    return (
        None if gQ is None else _rows(gQ, tile),
        None if gK is None else _cols(gK, tile),
        None if gV is None else _cols(gV, tile),
    )


def _at(pair: Pair, j: int) -> Pair:
    return (None if pair[0] is None else pair[0][j], None if pair[1] is None else pair[1][j])


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a + b, in place of a; None is zero."""
    if a is None or b is None:
        return b if a is None else a
    return a.add_(b)


def _times(weights: Tensor, Z: Tensor | None) -> Tensor:
    return weights if Z is None else weights * Z


def _tangent_scores(at: _Shared, gQ: Tensor | None, gK: Tensor | None) -> Tensor | None:
    """W = s·(gQ Kᵀ + Q gKᵀ), or None where it is zero."""
    W = None if gQ is None else torch.bmm(gQ * at.scale, at.k.mT)
    if gK is None:
        return W
    return torch.bmm(at.q * at.scale, gK.mT) if W is None else W.baddbmm_(at.q, gK.mT, alpha=at.scale)


def _score_cotangent(P: Tensor, dS: Tensor, W: Tensor | None, N: Tensor | None) -> Tensor:
    """Γ from Ẇ and N = dO gVᵀ, which are overwritten; one of them may be None."""
    if N is None:
        assert W is not None
        X = W.mul_(dS)
    else:
        X = N.mul_(P) if W is None else N.mul_(P).addcmul_(dS, W)
    return X.addcmul_(P, X.sum(-1, keepdim=True), value=-1)


def _scores(cuts: Plan, tile: Tile, q: Tensor, k: Tensor) -> Tensor:
    """S of one tile, with the bias, −∞ at keys that are not seen."""
    scores = torch.bmm(q * cuts.scale, k.mT)
    if cuts.extras is not None:
        cuts.extras.hide(cuts.extras.add(scores, tile), tile, -torch.inf)
    return tile.hide(scores, cuts.mask, cuts.lengths, -torch.inf)


def _weights(cuts: Plan, tile: Tile, q: Tensor, k: Tensor, stats: Tensor, kept: Tensor) -> Tensor:
    """P of one tile: the kept one, or exp(S − LSE).

    A bias may be so large (−10⁹ in single precision) that log Σ exp is lost in LSE: softmax is taken again.
    """
    if kept.numel():
        return tile.view(kept)
    if cuts.extras is not None and cuts.extras.is_biased:
        scores = _scores(cuts, tile, q, k)
        empty = _rows(stats, tile)[..., None] == torch.inf
        return torch.softmax(scores, -1, out=scores).masked_fill_(empty, 0)
    scores = _row_centered(stats, tile, q, k, cuts.scale)
    if cuts.extras is None:
        return tile.hide(scores.exp_(), cuts.mask, cuts.lengths, 0)
    weights = cuts.extras.hide(scores.exp_(), tile, 0)
    return tile.hide(weights, cuts.mask, cuts.lengths, 0)


def _weight_gradients(D: Tensor, tile: Tile, do: Tensor, v: Tensor, Z: Tensor | None) -> Tensor:
    """Z∘(dO Vᵀ) − D."""
    if Z is None:
        return _row_centered(D, tile, do, v)
    return torch.bmm(do, v.mT).mul_(Z).sub_(_rows(D, tile)[..., None])


def _row_centered(stat: Tensor, tile: Tile, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """scale·a bᵀ minus one number per row."""
    return torch.baddbmm(_rows(stat, tile)[..., None], a, b.mT, beta=-1, alpha=scale)


def _rows(x: Tensor, tile: Tile) -> Tensor:
    """A tile's rows of (B·Hkv, group, L, …), those of a group stacked: (heads, group·rows, …)."""
    return x[tile.heads, :, tile.rows].flatten(1, 2)


def _cols(x: Tensor, tile: Tile) -> Tensor:
    """A tile's keys of (B·Hkv, 1, L, d): (heads, keys, d), a view."""
    return x[tile.heads, 0, tile.keys]


def _put(
    out: Tensor, tile: Tile, a: Tensor | None, b: Tensor | None, scale: float = 1.0, *, add=False
) -> None:
    """Write scale·a b into a tile's rows of `out`, or add it; nothing is done where a or b is None."""
    if a is not None and b is not None:
        _multiply(out[tile.heads, :, tile.rows], a, b, scale, add=add)


def _add(out: Tensor, tile: Tile, a: Tensor | None, b: Tensor | None, scale: float = 1.0) -> None:
    """Add scale·aᵀ b to a tile's keys of `out`; nothing is done where a or b is None."""
    if a is not None and b is not None:
        _multiply(out[tile.heads, :, tile.keys], a.mT, b, scale, add=True)


def _multiply(target: Tensor, a: Tensor, b: Tensor, scale: float, *, add: bool) -> None:
    """target (heads, group, rows, d) = or += scale·a b, where a b is (heads, group·rows, d)."""
    if target.is_contiguous():
        target.view(a.shape[0], a.shape[1], -1).baddbmm_(a, b, beta=float(add), alpha=scale)
        return
    product = torch.bmm(a, b).view(target.shape)  # baddbmm_ into a slice would go matrix by matrix
    if add:
        target.add_(product, alpha=scale)
    else:
        torch.mul(product, scale, out=target)


def _like(x: Tensor, like: Tensor, *lead: int) -> Tensor:
    """(B·Hkv, group, L, d) as (B, H, L, d) again."""
    return _shaped(x, *lead, *like.shape).to(like.dtype)


def _shaped(x: Tensor, *shape: int) -> Tensor:
    """Return the tensor in another shape, in the same memory, without being a view of it for autograd.

    A view that an autograd function returns cannot be written into later, and forward mode through it asserts
    that tangents are laid out as their primals. Recordings of products refuse `resize_`.
    """
    return torch.ops.aten._unsafe_view(x, shape)
