"""Attention, its derivative and its second derivative as launches of Triton kernels.

The functions are those of `blockwise`. Nothing is kept between the passes but LSE. Single precision is
multiplied as PyTorch multiplies it: fully, or in TF32 if PyTorch allows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from curvescope.kernels.attention.mask import Mask
from curvescope.kernels.attention.passes import Directions, Needs, Outputs, Saved
from curvescope.kernels.attention.triton_first import dkv_kernel, dq_kernel, forward_kernel
from curvescope.kernels.attention.triton_second import hkv_kernel, ho_kernel, hq_kernel
from curvescope.kernels.attention.triton_tiles import OVER_KEYS, Tile, check_tile, precision, tile_of

Tiles = Mapping[str, Tile]  # of some kernels, instead of those of the table


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float,
    keep: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """O, LSE (+∞ where no key is seen), and an empty tensor: P is not kept."""
    q, k, v = _dense(q), _dense(k), _dense(v)
    o, lse = _empty(q, v.shape[3]), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    given = _given(q, k, v, mask, scale) | _strides(q=q, k=k, v=v, o=o)
    _launch("forward", forward_kernel, given, tiles, q=q, k=k, v=v, o=o, lse=lse)
    return o, lse, q.new_empty(0)


def backward(
    saved: Saved,
    do: Tensor,
    *,
    mask: Mask,
    scale: float,
    keep: bool = False,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV for an incoming dO, and an empty tensor: dS is not kept."""
    q, k, v, o, do = (_dense(x) for x in (saved.q, saved.k, saved.v, saved.o, do))
    lse = saved.lse.contiguous()
    dq, dk, dv = _empty(q, q.shape[3]), _empty(k, k.shape[3]), _empty(v, v.shape[3])
    delta = torch.empty_like(lse)
    given = _given(q, k, v, mask, scale) | _strides(q=q, k=k, v=v, do=do)
    shared = {"q": q, "k": k, "v": v, "do": do, "lse": lse, "delta": delta}
    _launch("dq", dq_kernel, given | _strides(o=o, dq=dq), tiles, **shared, o=o, dq=dq)
    _launch("dkv", dkv_kernel, given | _strides(dk=dk, dv=dv), tiles, **shared, dk=dk, dv=dv)
    return dq, dk, dv, q.new_empty(0)


def second(
    saved: Saved,
    do: Tensor | None,
    dS: Tensor,
    directions: Directions,
    *,
    mask: Mask,
    scale: float,
    needs: Needs,
    tiles: Tiles | None = None,
) -> Outputs:
    """hQ, hK, hV, h_dO for n directions (n, B, H, L, d); None where `needs` says so."""
    q, k, v, o = (_dense(x) for x in (saved.q, saved.k, saved.v, saved.o))
    lse = saved.lse.contiguous()
    num = next(g.shape[0] for g in directions if g is not None)
    stats = do is not None and any(needs[:3])
    do = o if do is None else _dense(do)
    moves = dict(zip(("gq", "gk", "gv"), map(_moved, directions, (q, k, v)), strict=True))
    given = _given(q, k, v, mask, scale) | _strides(q=q, k=k, v=v, do=do, **moves)
    given |= {name.upper(): g is not None for name, g in zip(moves, directions, strict=True)}
    mean, cross = (torch.empty((num, *lse.shape), dtype=lse.dtype, device=lse.device) for _ in range(2))
    shared = {"q": q, "k": k, "v": v, "do": do, "lse": lse, **moves}
    shared |= {"mean": mean, "cross": cross, "delta": torch.empty_like(lse)}
    ho = _empty(q, v.shape[3], num)
    _launch(
        "ho", ho_kernel, given | _strides(o=o, ho=ho) | {"STATS": stats}, tiles, num, **shared, o=o, ho=ho
    )
    hq = hk = hv = None
    if needs[0]:
        hq = _empty(q, q.shape[3], num)
        _launch("hq", hq_kernel, given | _strides(hq=hq), tiles, num, **shared, hq=hq)
    if needs[1] or needs[2]:
        hk, hv = _empty(k, k.shape[3], num), _empty(v, v.shape[3], num)
        _launch("hkv", hkv_kernel, given | _strides(hk=hk, hv=hv), tiles, num, **shared, hk=hk, hv=hv)
    return hq, hk if needs[1] else None, hv if needs[2] else None, ho if needs[3] else None


def _launch(
    name: str, kernel: Any, given: dict[str, Any], tiles: Tiles | None, num: int = 1, /, **tensors: Tensor
) -> None:
    """One program for each tile of queries (or of keys), each head, and each of `num` directions."""
    q, k = tensors["q"], tensors["k"]
    tile = (tiles or {}).get(name) or tile_of(name, q.dtype, max(given["d"], given["e"]))
    check_tile(name, tile)
    over_keys = name in OVER_KEYS
    count = triton.cdiv(k.shape[2], tile.cols) if over_keys else triton.cdiv(q.shape[2], tile.rows)
    grid = (count, q.shape[0] * (k.shape[1] if over_keys else q.shape[1]), num)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        kernel[grid](
            **tensors, **given, ROWS=tile.rows, COLS=tile.cols, num_warps=tile.warps, num_stages=tile.stages
        )


def _given(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> dict[str, Any]:
    """Arguments of every kernel."""
    d, e = q.shape[3], v.shape[3]
    lengths = (
        q.new_empty(1, dtype=torch.int32) if mask.lengths is None else mask.lengths.to(q.device).contiguous()
    )
    return {
        "lengths": lengths,
        "queries": q.shape[2],
        "keys": k.shape[2],
        "heads": q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "window": mask.window or 0,
        "scale": scale,
        "d": d,
        "e": e,
        "D": max(16, triton.next_power_of_2(d)),
        "E": max(16, triton.next_power_of_2(e)),
        "CAUSAL": mask.causal,
        "WINDOW": mask.window is not None,
        "LENGTHS": mask.lengths is not None,
        "PRECISION": precision(),
    }


def _strides(**tensors: Tensor) -> dict[str, tuple[int, ...]]:
    return {f"{name}_s": x.stride()[:-1] for name, x in tensors.items()}


def _dense(x: Tensor) -> Tensor:
    """The tensor, copied only where its last axis is not contiguous.

    The tangents of constants in forward mode are zeros without memory, which a kernel cannot read.
    """
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x if x.stride(-1) == 1 else x.contiguous()


def _moved(direction: Tensor | None, like: Tensor) -> Tensor:
    """A direction (n, B, H, L, d); any tensor of that rank for a missing one, which is not read."""
    return like[None] if direction is None else _dense(direction)


def _empty(like: Tensor, size: int, num: int | None = None) -> Tensor:
    """([num,] B, H, L, size), laid out by token or by head as `like` is; not a view."""
    B, H, L, _ = like.shape
    by_token = like.stride(1) < like.stride(2)
    stride = (B * H * L * size, H * L * size, *((size, H * size) if by_token else (L * size, size)), 1)
    lead = () if num is None else (num,)
    return like.new_empty_strided((*lead, B, H, L, size), stride[-4 - len(lead) :])
