"""Masks, and tiles of the scores that skip hidden keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError


@dataclass(frozen=True)
class Mask:
    """Query i sees key j where j < length, j ≤ i if causal, and |i − j| < window."""

    causal: bool = False
    window: int | None = None
    lengths: Tensor | None = None  # (B,), integers

    def repeated(self, times: int) -> Mask:
        """The mask of `times` copies of the batch, one after the other."""
        return self if self.lengths is None else replace(self, lengths=self.lengths.repeat(times))

    def keys(self, start: int, stop: int, num_keys: int) -> tuple[int, int]:
        """First and last (excluded) key that some query in [start, stop) may see, lengths aside."""
        last = min(stop, num_keys) if self.causal else num_keys
        if self.window is None:
            return 0, last
        last = min(last, stop + self.window - 1)
        return min(max(0, start - self.window + 1), last), last

    def empties(self, queries: int, keys: int) -> bool:
        """Return True if a query may be without keys."""
        return self.lengths is not None or (self.window is not None and queries >= keys + self.window)


@dataclass(frozen=True)
class Tile:
    """Scores of some heads, some queries and the keys they see; a block of rows of the score matrix."""

    heads: slice  # of the B·Hkv key heads
    rows: slice
    keys: slice
    group: int  # query heads per key head; they follow each other in the rows of a tile
    offset: int  # where the tile begins in a buffer that holds all of them

    @property
    def shape(self) -> tuple[int, int, int]:
        return (_count(self.heads), self.group * _count(self.rows), _count(self.keys))

    def view(self, buffer: Tensor) -> Tensor:
        """This tile's part of a flat buffer of `num_scores` entries."""
        size = torch.Size(self.shape).numel()
        return buffer[self.offset : self.offset + size].view(self.shape)

    def hide(self, scores: Tensor, mask: Mask, lengths: Tensor | None, value: float) -> Tensor:
        """Set the scores of unseen keys to `value`, in place; `lengths` has one entry per key head."""
        if mask.causal or mask.window is not None:
            split = scores.view(scores.shape[0], self.group, -1, scores.shape[2])
            self._hide_far(split, mask, value)
        if lengths is not None:
            place = torch.arange(self.keys.start, self.keys.stop, device=scores.device)
            scores.masked_fill_(place >= lengths[self.heads, None, None], value)
        return scores

    def _hide_far(self, scores: Tensor, mask: Mask, value: float) -> None:
        diagonal = self.rows.start - self.keys.start  # column of the key at the first row's own place
        ahead = 0 if mask.causal else (mask.window or 1) - 1  # so many keys behind its own a query sees
        cut = mask.window is not None and diagonal + _count(self.rows) > mask.window
        back = diagonal - (mask.window or 0)
        if value == 0:
            scores.tril_(diagonal + ahead)
            if cut:
                scores.triu_(back + 1)
            return
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        unseen.triu_(diagonal + ahead + 1)
        if cut:
            unseen |= torch.ones_like(unseen).tril_(back)
        scores.masked_fill_(unseen, value)


def cut(
    mask: Mask, *, heads: int, group: int, queries: int, keys: int, row_count: int, tile_scores: int
) -> list[Tile]:
    """Tiles of at most `row_count` queries and about `tile_scores` scores that cover what is seen."""
    row_count = max(1, min(row_count, queries, tile_scores // max(1, group * keys)))
    head_count = max(1, min(heads, tile_scores // max(1, group * row_count * keys)))
    tiles, offset = [], 0
    for head in range(0, heads, head_count):
        for row in range(0, queries, row_count):
            stop = min(row + row_count, queries)
            seen = slice(*mask.keys(row, stop, keys))
            if seen.start == seen.stop:
                continue
            tile = Tile(slice(head, min(head + head_count, heads)), slice(row, stop), seen, group, offset)
            tiles.append(tile)
            offset += torch.Size(tile.shape).numel()
    return tiles


def num_scores(tiles: list[Tile]) -> int:
    """Entries of all tiles together."""
    last = tiles[-1]
    return last.offset + torch.Size(last.shape).numel()


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
    """Raise unless shapes, types and the mask fit each other."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ShapeError(f"expected q, k and v of shape (B, H, L, d), got {shapes}")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3]):
        raise ShapeError(f"expected the same batch, and the same heads and length of k and v, got {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ShapeError(f"expected queries and keys of one size, got {shapes}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ShapeError(f"expected a number of query heads that key heads divide, got {shapes}")
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ShapeError(f"expected at least one entry along every axis, got {shapes}")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ShapeError("expected q, k and v of one dtype on one device", hint="cast or move them first")
    if not q.is_floating_point():
        raise ShapeError(f"expected floating-point q, k and v, got {q.dtype}")
    _check_mask(q, k, mask)


def _check_mask(q: Tensor, k: Tensor, mask: Mask) -> None:
    if mask.causal and q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"expected as many keys as queries with causal=True, got {k.shape[2]} and {q.shape[2]}"
        )
    if mask.window is not None and (not mask.causal or mask.window < 1):
        raise ShapeError(
            f"expected window >= 1 with causal=True, got window={mask.window}, causal={mask.causal}"
        )
    lengths = mask.lengths
    if lengths is None:
        return
    if lengths.shape != q.shape[:1] or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ShapeError(
            f"expected {q.shape[0]} whole numbers as lengths, got {lengths.dtype} {tuple(lengths.shape)}"
        )


def _count(part: slice) -> int:
    return part.stop - part.start
