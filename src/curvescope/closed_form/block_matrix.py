"""A symmetric matrix cut into named blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError, near_misses

Pair = tuple[str, str]
INPUT = "x"
"""Name of the input of a layer or network among its blocks."""


@dataclass(frozen=True, eq=False)
class BlockMatrix(Mapping[Pair, Tensor]):
    """Second derivatives by pairs of names: `H["L0.W_Q", "L0.W_K"]` is (entries of W_Q, entries of W_K).

    Entries of a parameter are in row-major order, inputs × outputs. `matrix` holds all blocks, in the order
    of `sizes`.
    """

    matrix: Tensor  # (n, n)
    sizes: Mapping[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rows, which are those of the columns, in order."""
        return tuple(self.sizes)

    @property
    def slices(self) -> dict[str, slice]:
        """Slices of the entries of each name in a row of `matrix`."""
        return slices(self.sizes)

    def __getitem__(self, pair: Pair) -> Tensor:
        row, column = (self._slice(name) for name in pair)
        return self.matrix[row, column]

    def __iter__(self) -> Iterator[Pair]:
        return ((a, b) for a in self.sizes for b in self.sizes)

    def __len__(self) -> int:
        return len(self.sizes) ** 2

    def __add__(self, other: BlockMatrix) -> BlockMatrix:
        if dict(self.sizes) != dict(other.sizes) or self.names != other.names:
            raise ShapeError(f"cannot add matrices over {self.names} and {other.names}")
        return BlockMatrix(self.matrix + other.matrix, self.sizes)

    def to_dense(self, names: Sequence[str] | None = None) -> Tensor:
        """The matrix over the given names in that order; over all of them without."""
        if names is None:
            return self.matrix
        index = torch.cat([torch.arange(self.matrix.shape[0])[self._slice(name)] for name in names])
        index = index.to(self.matrix.device)
        return self.matrix[index[:, None], index]

    def select(self, names: Sequence[str]) -> BlockMatrix:
        """The blocks of the given names only."""
        return BlockMatrix(self.to_dense(names), {name: self.sizes[name] for name in names})

    def _slice(self, name: str) -> slice:
        if name not in self.sizes:
            raise UsageError(f"no block is called {name!r}", hint=near_misses(name, list(self.sizes)))
        return self.slices[name]


def slices(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Consecutive slices of the given lengths."""
    found, start = {}, 0
    for name, size in sizes.items():
        found[name] = slice(start, start + size)
        start += size
    return found


def symmetric(blocks: Mapping[Pair, Tensor], sizes: Mapping[str, int], like: Tensor) -> BlockMatrix:
    """The symmetric matrix of blocks given once: (a, b) also fills (b, a); blocks not given are zero."""
    n, place = sum(sizes.values()), slices(sizes)
    found = torch.zeros(n, n, dtype=like.dtype, device=like.device)
    for (a, b), block in blocks.items():
        matrix = block.reshape(sizes[a], sizes[b])
        found[place[a], place[b]] = matrix
        if a != b:
            found[place[b], place[a]] = matrix.T
    return BlockMatrix(found, dict(sizes))
