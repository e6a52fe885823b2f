"""A symmetric matrix split into named blocks."""

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
        """Names of the rows and columns, in order."""
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
        """Return the matrix over the given names, in their order; by default over all names."""
        if names is None:
            return self.matrix
        index = torch.cat([torch.arange(self.matrix.shape[0])[self._slice(name)] for name in names])
        index = index.to(self.matrix.device)
        return self.matrix[index[:, None], index]

    def select(self, names: Sequence[str]) -> BlockMatrix:
        """Return the blocks of the given names only."""
        return BlockMatrix(self.to_dense(names), {name: self.sizes[name] for name in names})

    def _slice(self, name: str) -> slice:
        if name not in self.sizes:
            raise UsageError(f"no block is called {name!r}", hint=near_misses(name, list(self.sizes)))
        return self.slices[name]


def slices(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Return consecutive slices of the given lengths."""
    result, start = {}, 0
    for name, size in sizes.items():
        result[name] = slice(start, start + size)
        start += size
    return result


def symmetric(blocks: Mapping[Pair, Tensor], sizes: Mapping[str, int], like: Tensor) -> BlockMatrix:
    """Return the symmetric matrix of blocks: (a, b) also fills (b, a), and missing blocks are zero."""
    n, positions = sum(sizes.values()), slices(sizes)
    full = torch.zeros(n, n, dtype=like.dtype, device=like.device)
    for (a, b), block in blocks.items():
        matrix = block.reshape(sizes[a], sizes[b])
        full[positions[a], positions[b]] = matrix
        if a != b:
            full[positions[b], positions[a]] = matrix.T
    return BlockMatrix(full, dict(sizes))
