"""Layout of vectors that are sharded over ranks.

A parameter is cut along its first axis, like DTensor's `Shard(0)`: ⌈d/R⌉ rows for each rank, fewer or none
for the last ranks. For a vector over blocks, a rank holds the entries in its rows, in the order of the full
vector. Sums over entries are added over the ranks (`ShardGroup.sum`), so all ranks have the same numbers and
take the same branches.
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
class ShardGroup:
    """Ranks that hold the shards; a group of None means all ranks."""

    group: ProcessGroup | None
    rank: int
    ranks: int

    def rows(self, count: int, rank: int | None = None) -> range:
        """Range of the rows, out of `count`, that a rank holds; this rank by default."""
        num_rows, rank_number = -(-count // self.ranks), self.rank if rank is None else rank
        return range(min(rank_number * num_rows, count), min((rank_number + 1) * num_rows, count))

    def sum(self, partial: Tensor) -> Tensor:
        """Sum a small tensor over ranks; the result has the same bits on every rank."""
        return self._reduced(partial, "SUM")

    def max(self, value: float, device: torch.device) -> float:
        """Maximum of the ranks' numbers; nan if one of them is."""
        buffer = torch.tensor([value, float(value != value)], dtype=_wide(device), device=device)
        buffer[0].nan_to_num_(nan=0.0)
        top, undefined = self._reduced(buffer, "MAX").tolist()
        return float("nan") if undefined else top

    def min(self, value: float, device: torch.device) -> float:
        """Minimum of the ranks' numbers."""
        return -self.max(-value, device)

    def all(self, holds: bool, device: torch.device) -> bool:
        """Return True if a condition holds on every rank."""
        return (self.ranks == 1 and holds) or (self.ranks > 1 and self.min(float(holds), device) == 1.0)

    def _reduced(self, partial: Tensor, how: str) -> Tensor:
        if self.ranks == 1:
            return partial
        import torch.distributed as dist

        result = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, op=getattr(dist.ReduceOp, how), group=self.group)
        return result


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


# ------------------------------------------------------------------------------------------------- context

_spread: ContextVar[ShardGroup | None] = ContextVar("curvescope_spread", default=None)


@contextmanager
def sharded_over(spread: ShardGroup | None) -> Iterator[None]:
    """Declare that vectors inside are sharded over these ranks: sums over entries add over the ranks."""
    token = _spread.set(spread)
    try:
        yield
    finally:
        _spread.reset(token)


def current_shard_group() -> ShardGroup | None:
    """Return the ranks over which vectors are sharded here; None if vectors are complete."""
    return _spread.get()


# ------------------------------------------------------------------------------------------------- shards


@final
@dataclass(frozen=True, eq=False)
class VectorShard:
    """Entries of a vector over blocks that this rank holds.

    `blocks` are views of the full parameters, which have the given `shapes`.
    """

    spread: ShardGroup
    blocks: tuple[Block, ...]
    shapes: Mapping[str, tuple[int, ...]]

    @cached_property
    def length(self) -> int:
        """Number of entries of the full vector."""
        return sum(block.size for block in self.blocks)

    @cached_property
    def size(self) -> int:
        """Number of entries on this rank."""
        return sum(part.count for part in self._parts)

    def block(self, name: str) -> VectorShard:
        """Return the shard of one block."""
        return VectorShard(self.spread, tuple(b for b in self.blocks if b.name == name), self.shapes)

    @cached_property
    def _parts(self) -> tuple[_LocalBlock, ...]:
        return tuple(_LocalBlock(b, self.shapes[b.parameter], self.spread) for b in self.blocks)

    def write_local(self, drawn: Iterator[Tensor], out: Tensor) -> None:
        """Write this rank's entries of a full vector, which arrives in chunks, to `out` (size,)."""
        parts, begin, position = (
            iter(self._parts),
            0,
            0,
        )  # of the part in the vector, and of what is next in out
        part, start = next(parts, None), 0
        for piece in drawn:
            offset = 0
            while part is not None and offset < len(piece):
                stop = min(len(piece), begin + part.block.size - start)
                mask = part.local_entries(start + offset - begin, start + stop - begin, piece.device)
                entries = piece[offset:stop][mask]
                out[position : position + len(entries)].copy_(entries)
                position, offset = position + len(entries), stop
                if start + offset == begin + part.block.size:
                    begin, part = begin + part.block.size, next(parts, None)
            start += len(piece)

    def positions(self) -> Tensor:
        """Positions of this rank's entries in the full vector, (size,); takes the memory of a full vector."""
        result = torch.empty(self.size, dtype=torch.long)
        self.write_local(iter([torch.arange(self.length)]), result)
        return result


class _LocalBlock:
    """Entries of one block on this rank.

    The leading axes of `split` make up the parameter's first axis. They determine the row of an entry:
    row = Σ_a (i_a + start_a) stride_a.
    """

    def __init__(self, block: Block, shape: Sequence[int], spread: ShardGroup):
        self.block, self._rows = block, spread.rows(shape[0])
        leading = leading_axes(block, shape)
        starts, sizes = narrow_ranges(block)
        strides = [prod(block.split[a + 1 : leading]) for a in range(leading)]
        order = block.order or tuple(range(len(block.split)))
        inner = [prod(sizes[b] for b in order[order.index(a) + 1 :]) for a in range(leading)]
        self._axes = list(zip(inner, sizes, starts, strides, strict=False))
        table = torch.zeros(1, dtype=torch.long)  # the row of every entry along the leading axes
        for size, start, stride in zip(sizes, starts, strides, strict=False):
            table = (table[:, None] + (torch.arange(size) + start) * stride).flatten()
        mask, self._width = self._inside(table), prod(sizes[leading:])
        count = int(mask.sum())
        self.count = count * self._width
        self._first = int(mask.int().argmax()) if count else 0
        in_a_row = bool(mask[self._first : self._first + count].all())
        self._is_contiguous = in_a_row and order[:leading] == tuple(range(leading))

    def local_entries(self, start: int, stop: int, device: torch.device) -> slice | Tensor:
        """Select this rank's entries among the entries start, …, stop − 1 of the block."""
        if self._is_contiguous:
            low = self._first * self._width
            return slice(max(low - start, 0), max(min(low + self.count, stop) - start, 0))
        index = torch.arange(start, stop, device=device)
        row = torch.zeros_like(index)
        for inner, size, first, stride in self._axes:
            row += ((index // inner) % size + first) * stride
        return self._inside(row)

    def _inside(self, row: Tensor) -> Tensor:
        return (row >= self._rows.start) & (row < self._rows.stop)


def narrow_ranges(block: Block) -> tuple[list[int], list[int]]:
    """Start and length of a block along each axis of `split`."""
    cut = {axis: (start, length) for axis, start, length in block.narrow}
    ranges = [cut.get(axis, (0, size)) for axis, size in enumerate(block.split)]
    return [start for start, _ in ranges], [length for _, length in ranges]


def leading_axes(block: Block, shape: Sequence[int]) -> int:
    """Number of axes of `split` that make up the first axis of the parameter."""
    for count in range(1, len(block.split) + 1):
        if prod(block.split[:count]) == shape[0]:
            return count
    raise UsageError(f"the block {block.name} mixes rows of {block.parameter}, so it cannot be sharded")
