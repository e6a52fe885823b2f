"""Attention, its derivative and its second derivative by tiles of the score matrix, in plain torch.

With P = softmax(s·QKᵀ) recomputed from the row statistic LSE, D = Σ dO∘O and dS = P∘(dO Vᵀ − D), the second
derivative in directions gQ, gK, gV is

    W = s·(gQ Kᵀ + Q gKᵀ),  Ẇ = W − Σ_j P∘W,  Ṗ = P∘Ẇ,  X = dS∘Ẇ + P∘(dO gVᵀ),  Γ = X − P·Σ_j X,
    hQ = s·(Γ K + dS gK),  hK = s·(Γᵀ Q + dSᵀ gQ),  hV = Ṗᵀ dO,  h_dO = Ṗ V + P gV,

where sums over j are sums of rows. h_dO is the forward-mode derivative of attention. The query heads of one
key head are stacked along the rows of a tile, so that keys and values are never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvescope.kernels.attention.mask import Mask, Tile, cut, num_scores
from curvescope.kernels.attention.passes import Directions, Needs, Outputs, Saved

TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # of the scores of one tile
CAUSAL_ROWS = {"cpu": 64, "cuda": 512}  # of a causal tile at most: a cut leaves out what nobody sees
KEEP_BYTES = 32 << 20  # P and dS are kept between the passes where each is smaller; CPU only
TOGETHER, TOGETHER_BYTES = 4, 256 << 10  # so many directions with so small scores are one call


@dataclass(frozen=True)
class Plan:
    """How one call is cut, and its tensors as (B·Hkv, group, length, size)."""

    tiles: list[Tile]
    lengths: Tensor | None  # (B·Hkv,)
    mask: Mask
    scale: float
    heads: int
    group: int

    def split(self, x: Tensor) -> Tensor:
        """(B, H, L, d) as (B·Hkv, group, L, d); half precision is computed in single."""
        x = x.reshape(self.heads, -1, *x.shape[2:])
        return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x

    def small(self, q: Tensor, num: int) -> bool:
        """Whether the scores of `num` directions cost more calls than arithmetic."""
        return len(self.tiles) == 1 and num * num_scores(self.tiles) * q.element_size() <= TOGETHER_BYTES


def plan(q: Tensor, k: Tensor, mask: Mask, scale: float) -> Plan:
    """The cut of one call. It is the same for the three functions below, so kept tiles can be found again."""
    heads, group = k.shape[0] * k.shape[1], q.shape[1] // k.shape[1]
    queries, keys = q.shape[2], k.shape[2]
    device = "cpu" if q.device.type == "cpu" else "cuda"
    rows, scores = (
        CAUSAL_ROWS[device] if mask.causal else queries,
        TILE_BYTES[device] // max(4, q.element_size()),
    )
    tiles = cut(
        mask, heads=heads, group=group, queries=queries, keys=keys, row_count=rows, tile_scores=scores
    )
    lengths = None if mask.lengths is None else mask.lengths.to(q.device).repeat_interleave(k.shape[1])
    return Plan(tiles, lengths, mask, scale, heads, group)


def worth_keeping(q: Tensor, k: Tensor) -> bool:
    """Whether P and dS are small enough to be kept for later passes."""
    size = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.element_size()
    return q.device.type == "cpu" and size <= KEEP_BYTES and q.element_size() >= 4


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """O, LSE (+∞ where no key is seen), and P tile after tile, empty unless `keep`."""
    cuts = plan(q, k, mask, scale)
    Q, K, V = cuts.split(q), cuts.split(k), cuts.split(v)
    out, LSE = Q.new_empty(*Q.shape[:3], V.shape[3]), Q.new_empty(Q.shape[:3])
    kept = Q.new_empty(num_scores(cuts.tiles) if keep else 0)
    for tile in cuts.tiles:
        scores = torch.bmm(_rows(Q, tile) * scale, _cols(K, tile).mT)
        tile.hide(scores, mask, cuts.lengths, -torch.inf)
        top = scores.amax(-1)
        P = torch.softmax(scores, -1, out=tile.view(kept) if keep else scores)
        lse = top - P.amax(-1).log_()
        if cuts.lengths is not None:
            empty = top == -torch.inf
            P.masked_fill_(empty[..., None], 0)
            lse.masked_fill_(empty, torch.inf)
        _put(out, tile, P, _cols(V, tile))
        part = LSE[tile.heads, :, tile.rows]
        part.copy_(lse.view(part.shape))
    return out.view(*q.shape[:3], v.shape[3]).to(q.dtype), LSE.view(q.shape[:3]), kept


def backward(
    saved: Saved,
    do: Tensor,
    *,
    mask: Mask,
    scale: float,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV for an incoming dO, and dS tile after tile, empty unless `keep`."""
    q, k, v, o, lse, kept_P = saved.q, saved.k, saved.v, saved.o, saved.lse, saved.P
    cuts = plan(q, k, mask, scale)
    Q, K, V, dO = cuts.split(q), cuts.split(k), cuts.split(v), cuts.split(do)
    stats, D = cuts.split(lse), (dO * cuts.split(o)).sum(-1)
    dQ, dK, dV = torch.empty_like(Q), torch.zeros_like(K), torch.zeros_like(V)
    kept = Q.new_empty(num_scores(cuts.tiles) if keep else 0)
    for tile in cuts.tiles:
        q_, k_, dO_ = _rows(Q, tile), _cols(K, tile), _rows(dO, tile)
        P = _weights(cuts, tile, q_, k_, stats, kept_P)
        dS = _row_centered(D, tile, dO_, _cols(V, tile))
        dS = torch.mul(dS, P, out=tile.view(kept) if keep else dS)
        _put(dQ, tile, dS, k_, scale)
        _add(dK, tile, dS, q_, scale)
        _add(dV, tile, P, dO_)
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
) -> Outputs:
    """hQ, hK, hV, h_dO for n directions (n, B, H, L, d); None where `needs` says so.

    Without dO only h_dO can be asked for. A direction that is None is zero.
    """
    q, k, v, o, lse, kept_P = saved.q, saved.k, saved.v, saved.o, saved.lse, saved.P
    cuts, num = plan(q, k, mask, scale), next(g.shape[0] for g in directions if g is not None)
    if num >= TOGETHER and cuts.small(q, num):
        return _together(num, saved, do, dS, directions, mask=mask.repeated(num), scale=scale, needs=needs)
    Q, K, V, stats = cuts.split(q), cuts.split(k), cuts.split(v), cuts.split(lse)
    dO = None if do is None or not any(needs[:3]) else cuts.split(do)
    D = None if dO is None or dS.numel() else (dO * cuts.split(o)).sum(-1)
    moves = [[None if g is None else cuts.split(g[j]) for g in directions] for j in range(num)]
    sizes = (Q.shape, K.shape, V.shape, (*Q.shape[:3], V.shape[3]))
    found = [Q.new_zeros(num, *size) if need else None for size, need in zip(sizes, needs, strict=True)]
    for tile in cuts.tiles:
        q_, k_, v_ = _rows(Q, tile), _cols(K, tile), _cols(V, tile)
        P, dS_, dO_ = _weights(cuts, tile, q_, k_, stats, kept_P), None, None
        if dO is not None:
            dO_ = _rows(dO, tile)
            dS_ = tile.view(dS) if D is None else _row_centered(D, tile, dO_, v_).mul_(P)
        shared = _Shared(tile, scale, q_, k_, v_, dO_, P, dS_)
        for j in range(num):
            _add_direction(shared, moves[j], [None if x is None else x[j] for x in found])
    pairs = zip(found, (q, k, v, o), strict=True)
    hq, hk, hv, ho = (None if x is None else _like(x, like, num) for x, like in pairs)
    return hq, hk, hv, ho


def _together(
    num: int, saved: Saved, do: Tensor | None, dS: Tensor, directions: Directions, **options: Any
) -> Outputs:
    """`num` directions as one direction of `num` copies of the batch: on a CPU the same bits."""

    def copies(x: Tensor) -> Tensor:
        return x.repeat(num, *(1,) * (x.dim() - 1))

    again = Saved(*map(copies, (saved.q, saved.k, saved.v, saved.o, saved.lse, saved.P)))
    gq, gk, gv = (None if g is None else g.flatten(0, 1)[None] for g in directions)
    found = second(again, None if do is None else copies(do), copies(dS), (gq, gk, gv), **options)
    hq, hk, hv, ho = (None if x is None else x[0].unflatten(0, (num, -1)) for x in found)
    return hq, hk, hv, ho


@dataclass(frozen=True)
class _Shared:
    """What all directions use of one tile."""

    tile: Tile
    scale: float
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor | None
    P: Tensor
    dS: Tensor | None


def _add_direction(at: _Shared, move: list[Tensor | None], into: list[Tensor | None]) -> None:
    """Add one tile's part for one direction to hQ, hK, hV, h_dO."""
    gQ = None if move[0] is None else _rows(move[0], at.tile)
    gK = None if move[1] is None else _cols(move[1], at.tile)
    gV = None if move[2] is None else _cols(move[2], at.tile)
    W = _tangent_scores(at, gQ, gK)
    dotP = None
    if W is not None:
        dotP = at.P * W
        mean = dotP.sum(-1, keepdim=True)
        dotP.addcmul_(at.P, mean, value=-1)
        W.sub_(mean)
    hQ, hK, hV, hO = into
    if hO is not None:
        _put(hO, at.tile, dotP, at.v)
        _put(hO, at.tile, at.P, gV, add=True)
    if at.dS is None or at.do is None:
        return
    if hV is not None:
        _add(hV, at.tile, dotP, at.do)
    X = _score_cotangent(at.P, at.dS, W, None if gV is None else torch.bmm(at.do, gV.mT))
    if hQ is not None:
        _put(hQ, at.tile, X, at.k, at.scale)
        _put(hQ, at.tile, at.dS, gK, at.scale, add=True)
    if hK is not None:
        _add(hK, at.tile, X, at.q, at.scale)
        _add(hK, at.tile, at.dS, gQ, at.scale)


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


def _weights(cuts: Plan, tile: Tile, q: Tensor, k: Tensor, stats: Tensor, kept: Tensor) -> Tensor:
    """P of one tile: the kept one, or exp(S − LSE)."""
    if kept.numel():
        return tile.view(kept)
    scores = _row_centered(stats, tile, q, k, cuts.scale)
    return tile.hide(scores.exp_(), cuts.mask, cuts.lengths, 0)


def _row_centered(stat: Tensor, tile: Tile, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """scale·a bᵀ less one number per row."""
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
    return x.view(*lead, *like.shape).to(like.dtype)
