"""Biases, hidden keys and dropout of attention scores, read one tile at a time.

All tensors have four axes that broadcast to those of the scores (B, H, Lq, Lk). A table (B, H, 1, Lq + Lk −
1) represents the bias table[j − i + Lq − 1], which is never formed completely.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.kernels.attention.mask import Tile

Pair = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Extras:
    """Tensors that modify the scores; a missing one has no effect."""

    bias: Tensor | None
    table: Tensor | None
    hidden: Tensor | None  # True where a key is not seen
    noise: Tensor | None  # False where a weight is dropped
    dropout: float
    heads: int  # key heads of one entry of the batch
    queries: int

    @property
    def is_biased(self) -> bool:
        """Return True if numbers are added to the scores."""
        return self.bias is not None or self.table is not None

    @property
    def empties(self) -> bool:
        """Return True if a row may have no visible key."""
        return self.hidden is not None or self.is_biased

    def add(self, scores: Tensor, tile: Tile) -> Tensor:
        """The scores of a tile (heads, group·rows, keys) plus bias and table, in place."""
        for term in (self._bias(self.bias, tile), self._toeplitz(self.table, tile)):
            if term is not None:
                split(scores, tile).add_(term)
        return scores

    def hide(self, scores: Tensor, tile: Tile, value: float) -> Tensor:
        """The scores of a tile with `value` at hidden keys, in place."""
        if self.hidden is not None:
            split(scores, tile).masked_fill_(self._part(self.hidden, tile), value)
        return scores

    def kept(self, tile: Tile, like: Tensor) -> Tensor | None:
        """1/(1 − p) where a weight of a tile is kept, otherwise 0; None without dropout."""
        if self.noise is None:
            return None
        rate = 0.0 if self.dropout == 1 else 1 / (1 - self.dropout)
        part = self._part(self.noise, tile).expand(split(like, tile).shape)
        return part.reshape(like.shape).to(like.dtype).mul_(rate)

    def tangent(self, tile: Tile, moves: Pair, like: Tensor) -> Tensor | None:
        """Direction of the scores of a tile that directions of bias and table add, as a new tensor."""
        total = None
        for term in (self._bias(moves[0], tile), self._toeplitz(moves[1], tile)):
            if term is not None:
                total = like.new_zeros(like.shape) if total is None else total
                split(total, tile).add_(term)
        return total

    def collect(self, into: Pair, dS: Tensor, tile: Tile) -> None:
        """Add the derivative in the scores of a tile to those of bias and table, each in its own shape."""
        bias, table = into
        parts = split(dS, tile)
        if bias is not None:
            if bias.shape[2] == 1:
                parts = parts.sum(2, keepdim=True)
            if bias.shape[3] == 1:
                parts = parts.sum(3, keepdim=True)
            rows = slice(None) if bias.shape[2] == 1 else tile.rows
            keys = slice(None) if bias.shape[3] == 1 else tile.keys
            self._collect(bias[:, :, rows, keys], parts, tile)
        if table is not None:
            sums = diagonal_sums(split(dS, tile))
            self._collect(table[..., self._diagonals(tile)], sums[:, :, None], tile)

    def _collect(self, into: Tensor, parts: Tensor, tile: Tile) -> None:
        """Add (heads, group, …) to a slice (b, h, …) of a derivative, summed over what is broadcast."""
        batch, heads = into.shape[:2]
        index = torch.arange(tile.heads.start, tile.heads.stop, device=into.device)
        if heads == 1:
            parts = parts.sum(1, keepdim=True)
            if batch == 1:
                into[0].add_(parts.sum(0))
            else:
                into.index_add_(0, index // self.heads, parts.to(into.dtype))
            return
        each = into.unflatten(1, (self.heads, -1))
        if batch == 1:
            each[0].index_add_(0, index % self.heads, parts.to(into.dtype))
        else:
            places = (index // self.heads, index % self.heads)
            each[places] += parts.to(into.dtype)

    def _bias(self, bias: Tensor | None, tile: Tile) -> Tensor | None:
        return None if bias is None else self._part(bias, tile)

    def _part(self, x: Tensor, tile: Tile) -> Tensor:
        """A tile of x, which broadcasts to (heads, group, rows, keys)."""
        x = x if x.shape[2] == 1 else x[:, :, tile.rows]
        return self._of_heads(x if x.shape[3] == 1 else x[..., tile.keys], tile)

    def _toeplitz(self, table: Tensor | None, tile: Tile) -> Tensor | None:
        if table is None:
            return None
        keys = tile.keys.stop - tile.keys.start
        windows = table[:, :, 0, self._diagonals(tile)].unfold(-1, keys, 1)
        return self._of_heads(windows.flip(-2), tile)

    def _diagonals(self, tile: Tile) -> slice:
        """The entries of a table that a tile reads."""
        last = self.queries - 1
        return slice(tile.keys.start - tile.rows.stop + 1 + last, tile.keys.stop - tile.rows.start + last)

    def _of_heads(self, x: Tensor, tile: Tile) -> Tensor:
        """(b, h, rows, keys) as (heads, group, rows, keys) of a tile; axes that are broadcast stay 1."""
        x = x[:, :, None] if x.shape[1] == 1 else x.unflatten(1, (self.heads, -1))
        if x.shape[0] == x.shape[1] == 1:
            return x[0]
        index = torch.arange(tile.heads.start, tile.heads.stop, device=x.device)
        batch = index // self.heads if x.shape[0] > 1 else torch.zeros_like(index)
        return x[batch, index % self.heads if x.shape[1] > 1 else torch.zeros_like(index)]


def split(scores: Tensor, tile: Tile) -> Tensor:
    """(heads, group·rows, keys) as (heads, group, rows, keys)."""
    return scores.view(scores.shape[0], tile.group, -1, scores.shape[2])


def diagonal_sums(x: Tensor) -> Tensor:
    """Sums of (…, R, C) over entries with the same j − i: (…, R + C − 1)."""
    rows, cols = x.shape[-2:]
    skewed = x.new_zeros(*x.shape[:-2], rows, rows + cols - 1)
    place = skewed.view(-1)[rows - 1 :]
    lead = x.shape[:-2].numel()
    stride = (rows * (rows + cols - 1), rows + cols - 2, 1)
    target = place.as_strided((lead, rows, cols), stride, place.storage_offset())
    target.copy_(x.reshape(lead, rows, cols))
    return skewed.sum(-2)
