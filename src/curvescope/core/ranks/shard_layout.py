"""Vectors that are spread over ranks: each holds a piece, and nobody all of it.

A parameter is cut along its first axis, as DTensor's `Shard(0)` does: ⌈d/R⌉ rows for every rank, fewer or
none for the last ones. For a vector over blocks, a rank holds the entries in its rows, in the order of the
full vector. Numbers that are sums over entries are added up over the ranks (`Spread.added`), so every rank
has the same ones and takes the same branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from curvescope.core.blocks import Block
from curvescope.core.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@final
@dataclass(frozen=True, eq=False)
class Spread:
    """The ranks that hold the pieces; None is every rank there is."""

    group: ProcessGroup | None
    rank: int
    ranks: int

    def rows(self, count: int, rank: int | None = None) -> range:
        """Return the rows, of `count` rows, that a rank holds; this rank by default."""
        each, at = -(-count // self.ranks), self.rank if rank is None else rank
        return range(min(at * each, count), min((at + 1) * each, count))

    def added(self, partial: Tensor) -> Tensor:
        """Σ_ranks of a small tensor; the same bits on every rank."""
        return self._reduced(partial, "SUM")

    def largest(self, value: float, device: torch.device) -> float:
        """The largest of the numbers that the ranks give; nan if one is."""
        found = torch.tensor([value, float(value != value)], dtype=_wide(device), device=device)
        found[0].nan_to_num_(nan=0.0)
        top, undefined = self._reduced(found, "MAX").tolist()
        return float("nan") if undefined else top

    def least(self, value: float, device: torch.device) -> float:
        """The smallest of the numbers that the ranks give."""
        return -self.largest(-value, device)

    def all(self, holds: bool, device: torch.device) -> bool:
        """Return True if something holds on every rank."""
        return (self.ranks == 1 and holds) or (self.ranks > 1 and self.least(float(holds), device) == 1.0)

    def _reduced(self, partial: Tensor, how: str) -> Tensor:
        if self.ranks == 1:
            return partial
        import torch.distributed as dist

        found = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, op=getattr(dist.ReduceOp, how), group=self.group)
        return found


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


# ------------------------------------------------------------------------------------------------- context

_spread: ContextVar[Spread | None] = ContextVar("curvescope_spread", default=None)


@contextmanager
def over(spread: Spread | None) -> Iterator[None]:
    """Inside, vectors are pieces: sums over their entries are added up over these ranks."""
    token = _spread.set(spread)
    try:
        yield
    finally:
        _spread.reset(token)


def current() -> Spread | None:
    """The ranks that vectors are spread over here; None where they are whole."""
    return _spread.get()


# ------------------------------------------------------------------------------------------------- pieces


@final
@dataclass(frozen=True, eq=False)
class Pieces:
    """Entries of a vector over whole blocks that this rank holds.

    `blocks` are views of whole parameters, of the `shapes` given.
    """

    spread: Spread
    blocks: tuple[Block, ...]
    shapes: Mapping[str, tuple[int, ...]]

    @cached_property
    def length(self) -> int:
        """Entries of the whole vector."""
        return sum(block.size for block in self.blocks)

    @cached_property
    def size(self) -> int:
        """Entries that are here."""
        return sum(part.count for part in self._parts)

    def of(self, name: str) -> Pieces:
        """Those of one block alone."""
        return Pieces(self.spread, tuple(b for b in self.blocks if b.name == name), self.shapes)

    @cached_property
    def _parts(self) -> tuple[_Part, ...]:
        return tuple(_Part(b, self.shapes[b.parameter], self.spread) for b in self.blocks)

    def keep(self, drawn: Iterator[Tensor], out: Tensor) -> None:
        """Write to `out` (size,) the entries that are here, of a whole vector that comes piece by piece."""
        parts, begin, place = iter(self._parts), 0, 0  # of the part in the vector, and of what is next in out
        part, start = next(parts, None), 0
        for piece in drawn:
            at = 0
            while part is not None and at < len(piece):
                stop = min(len(piece), begin + part.block.size - start)
                here = part.taken(start + at - begin, start + stop - begin, piece.device)
                found = piece[at:stop][here]
                out[place : place + len(found)].copy_(found)
                place, at = place + len(found), stop
                if start + at == begin + part.block.size:
                    begin, part = begin + part.block.size, next(parts, None)
            start += len(piece)

    def positions(self) -> Tensor:
        """Positions of this rank's entries in the whole vector: (size,); for small vectors."""
        found = torch.empty(self.size, dtype=torch.long)
        self.keep(iter([torch.arange(self.length)]), found)
        return found


class _Part:
    """The entries of one block that are here.

    The block's leading axes, those of `split` that make up the parameter's first one, say in which row of it
    an entry lies: row = Σ_a (i_a + start_a) stride_a.
    """

    def __init__(self, block: Block, shape: Sequence[int], spread: Spread):
        self.block, self._rows = block, spread.rows(shape[0])
        leading = leading_axes(block, shape)
        starts, sizes = narrowed(block)
        strides = [prod(block.split[a + 1 : leading]) for a in range(leading)]
        order = block.order or tuple(range(len(block.split)))
        inner = [prod(sizes[b] for b in order[order.index(a) + 1 :]) for a in range(leading)]
        self._axes = list(zip(inner, sizes, starts, strides, strict=False))
        table = torch.zeros(1, dtype=torch.long)  # the row of every entry along the leading axes
        for size, start, stride in zip(sizes, starts, strides, strict=False):
            table = (table[:, None] + (torch.arange(size) + start) * stride).flatten()
        here, self._width = self._inside(table), prod(sizes[leading:])
        count = int(here.sum())
        self.count = count * self._width
        self._first = int(here.int().argmax()) if count else 0
        in_a_row = bool(here[self._first : self._first + count].all())
        self._even = in_a_row and order[:leading] == tuple(range(leading))

    def taken(self, start: int, stop: int, device: torch.device) -> slice | Tensor:
        """Return the entries start, …, stop − 1 of the block that this rank holds."""
        if self._even:
            low = self._first * self._width
            return slice(max(low - start, 0), max(min(low + self.count, stop) - start, 0))
        index = torch.arange(start, stop, device=device)
        row = torch.zeros_like(index)
        for inner, size, first, stride in self._axes:
            row += ((index // inner) % size + first) * stride
        return self._inside(row)

    def _inside(self, row: Tensor) -> Tensor:
        return (row >= self._rows.start) & (row < self._rows.stop)


def narrowed(block: Block) -> tuple[list[int], list[int]]:
    """Return where a block begins along each axis of `split`, and its length there."""
    cut = {axis: (start, length) for axis, start, length in block.narrow}
    found = [cut.get(axis, (0, size)) for axis, size in enumerate(block.split)]
    return [start for start, _ in found], [length for _, length in found]


def leading_axes(block: Block, shape: Sequence[int]) -> int:
    """Number of axes of `split` that make up the first axis of the parameter."""
    for count in range(1, len(block.split) + 1):
        if prod(block.split[:count]) == shape[0]:
            return count
    raise UsageError(f"the block {block.name} mixes rows of {block.parameter}, so it cannot be sharded")
