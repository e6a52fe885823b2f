"""Blocks and spaces: which entries of which parameters a vector is made of.

A block is a named view of one parameter, laid out inputs × outputs, row-major, whatever the layout of
the parameter itself: `L3.W_Q` may be the first third of the columns of a packed matrix, `L3.h5.W_Q` one
head of it. A space is an ordered list of blocks that do not overlap; it maps flat vectors to parameters
and back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import final

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError


@dataclass(frozen=True)
class Block:
    """A named view of a parameter: reshape to `split`, narrow, permute to `order`, reshape to `shape`.

    Packed query-key-value matrix of GPT-2, (d, 3 h k): the queries of head 5 are
    `Block("L0.h5.W_Q", "…c_attn.weight", split=(d, 3, h, k), narrow=((1, 0, 1), (2, 5, 1)),
    order=(0, 1, 2, 3), shape=(d, k))`. A `Linear.weight` (out, in) is `split=(out, in), order=(1, 0)`.
    """

    name: str
    parameter: str
    split: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    narrow: tuple[tuple[int, int, int], ...] = ()  # (axis of split, start, length)

    @property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its parameter, as it lies or with axes in another order."""
        shape = self.split if self.order is None else tuple(self.split[i] for i in self.order)
        return not self.narrow and shape == self.shape

    def whole_from(self, matrix: Tensor) -> Tensor:
        """The parameter, in the shape `split`, that a whole block's matrix makes; shares its memory."""
        if self.order is None:
            return matrix
        back = [self.order.index(axis) for axis in range(len(self.order))]
        return matrix.permute(back)

    def view(self, parameter: Tensor, lead: int = 0) -> Tensor:
        """The entries of this block as a strided view that shares memory with `parameter`.

        Args:
            lead: Axes in front of the parameter's own, which stay in front.
        """
        x = parameter.view((*parameter.shape[:lead], *self.split))
        for axis, start, length in self.narrow:
            x = x.narrow(lead + axis, start, length)
        return x if self.order is None else x.permute((*range(lead), *(lead + axis for axis in self.order)))

    def take(self, parameter: Tensor, lead: int = 0) -> Tensor:
        """The block's matrix, `shape`; a copy where the layout asks for one. Differentiable."""
        return self.view(parameter, lead).reshape((*parameter.shape[:lead], *self.shape))

    def put(self, matrix: Tensor, parameter: Tensor, lead: int = 0) -> None:
        """Write `matrix` (`size` entries) into the block's place in `parameter`."""
        place = self.view(parameter, lead)
        place.copy_(matrix.reshape(place.shape))

    def positions(self, parameter_shape: Sequence[int]) -> Tensor:
        """Flat positions of the block's entries in its parameter, in the block's order: (size,)."""
        return self.take(torch.arange(prod(parameter_shape)).view(*parameter_shape)).flatten()


def whole(name: str, parameter: str, shape: Sequence[int], *, transposed: bool = False) -> Block:
    """The block that is a whole parameter; `transposed` for a weight stored outputs × inputs."""
    shape = tuple(shape)
    if transposed:
        return Block(name, parameter, split=shape, order=(1, 0), shape=(shape[1], shape[0]))
    return Block(name, parameter, split=shape, shape=shape)


def by_role(blocks: Iterable[Block]) -> dict[str, list[Block]]:
    """Blocks of the same role in all layers together, in order: `L*.W_Q`, `L*.expert*.W_in`."""
    found: dict[str, list[Block]] = {}
    for block in blocks:
        found.setdefault(re.sub(r"^L\d+\.(expert\d+\.)?", _starred, block.name), []).append(block)
    return found


def _starred(front: re.Match[str]) -> str:
    """`L*.` for `L3.`, `L*.expert*.` for `L3.expert5.`."""
    return "L*.expert*." if front[1] else "L*."


@dataclass(frozen=True)
class ParamSpace:
    """Flat vectors over an ordered list of blocks.

    Entry order: block after block, each row-major. `shapes` gives the shape of every parameter that a
    block refers to.
    """

    blocks: tuple[Block, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def size(self) -> int:
        """Length n of a vector."""
        return sum(block.size for block in self.blocks)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each block lies in a vector, by name, in order."""
        found, start = {}, 0
        for block in self.blocks:
            found[block.name] = slice(start, start + block.size)
            start += block.size
        return found

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the blocks refer to, each once, in order."""
        return tuple(dict.fromkeys(block.parameter for block in self.blocks))

    @cached_property
    def _of(self) -> dict[str, list[Block]]:
        """The blocks of each parameter."""
        found: dict[str, list[Block]] = {}
        for block in self.blocks:
            found.setdefault(block.parameter, []).append(block)
        return found

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def gather(self, tree: Mapping[str, Tensor]) -> Tensor:
        """The vector (n,) of a tree of parameter-shaped tensors; a missing parameter counts as zero."""
        return self.gather_columns({name: x[None] for name, x in tree.items()}, 1)[:, 0]

    def gather_columns(self, tree: Mapping[str, Tensor], k: int) -> Tensor:
        """Columns (n, k) of a tree of tensors with k in front of each parameter's shape."""
        given = next((tree[name] for name in self.parameters if name in tree), None)
        like = torch.empty(0, dtype=self.dtype, device=self.device) if given is None else given
        found = like.new_empty(self.size, k)
        for block in self.blocks:
            rows = found[self.slices[block.name]]  # one view each: those of a split cannot be written to
            if block.parameter not in tree:
                rows.zero_()
                continue
            entries = block.view(tree[block.parameter], 1)
            rows.view(*entries.shape[1:], k).movedim(-1, 0).copy_(entries)
        return found

    def places(self, columns: Tensor, parameter: str, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each block of a parameter its place in columns (n, k), and its entries of x (k, *shape)."""
        for block in self._of[parameter]:
            entries = block.view(x, 1)
            rows = columns[self.slices[block.name]]
            yield rows.view(*entries.shape[1:], len(x)).movedim(-1, 0), entries

    def total(self, k: int) -> ColumnSum:
        """A sum of columns (n, k), whose terms come parameter by parameter."""
        return ColumnSum(self, k)

    def scatter(self, vector: Tensor) -> dict[str, Tensor]:
        """Parameter-shaped tensors that hold `vector` (n,) in the blocks' places and zero elsewhere."""
        tree = {
            name: torch.zeros(self.shapes[name], dtype=vector.dtype, device=vector.device)
            for name in self.parameters
        }
        for block, part in zip(self.blocks, self.split(vector).values(), strict=True):
            block.put(part, tree[block.parameter])
        return tree

    def scatter_columns(self, columns: Tensor) -> dict[str, Tensor]:
        """As `scatter` for each column of (n, k), stacked in front: (k, *parameter shape).

        Of a single column, parameters that are one block share its memory.
        """
        if columns.shape[1] == 0:
            return {name: columns.new_zeros(0, *self.shapes[name]) for name in self.parameters}
        if columns.shape[1] == 1:
            return {name: found[None] for name, found in self._scattered_views(columns[:, 0]).items()}
        tree = {name: columns.new_zeros(columns.shape[1], *self.shapes[name]) for name in self.parameters}
        for block, part in zip(self.blocks, self._parts(columns), strict=True):
            block.put(part.T, tree[block.parameter], 1)
        return tree

    def _scattered_views(self, vector: Tensor) -> dict[str, Tensor]:
        parts = self.split(vector.contiguous())
        tree = {}
        for name, blocks in self._of.items():
            if blocks[0].is_whole:
                tree[name] = blocks[0].whole_from(parts[blocks[0].name]).reshape(self.shapes[name])
                continue
            tree[name] = vector.new_zeros(self.shapes[name])
            for block in blocks:
                block.put(parts[block.name], tree[name])
        return tree

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """The blocks of a vector, by name, each in its block's shape."""
        if vector.dim() != 1:
            raise ShapeError(f"expected a vector of {self.size} entries, got {tuple(vector.shape)}")
        return {b.name: part.view(b.shape) for b, part in zip(self.blocks, self._parts(vector), strict=True)}

    def _parts(self, columns: Tensor) -> tuple[Tensor, ...]:
        """The rows (of a vector: the entries) of each block."""
        if columns.shape[0] != self.size:
            raise ShapeError(f"expected a vector of {self.size} entries, got {tuple(columns.shape)}")
        return columns.split([block.size for block in self.blocks])

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The vector of named blocks; the inverse of `split`. Every block must be there."""
        for block in self.blocks:
            if block.name not in parts or parts[block.name].numel() != block.size:
                got = tuple(parts[block.name].shape) if block.name in parts else "nothing"
                raise ShapeError(f"expected block {block.name!r} of shape {block.shape}, got {got}")
        return torch.cat([parts[block.name].reshape(-1) for block in self.blocks])


@final
class ColumnSum:
    """A sum of columns (n, k) over a space: the first term of a parameter is written, others are added."""

    def __init__(self, space: ParamSpace, k: int):
        self._space, self._seen = space, set[str]()
        self._columns = torch.empty(space.size, k, dtype=space.dtype, device=space.device)

    def add(self, parameter: str, x: Tensor) -> None:
        """A term (k, *shape) of one parameter."""
        for place, entries in self._space.places(self._columns, parameter, x):
            place.add_(entries) if parameter in self._seen else place.copy_(entries)
        self._seen.add(parameter)

    def whole(self) -> Tensor:
        """The sum; zero for parameters that had no term."""
        for block in self._space:
            if block.parameter not in self._seen:
                self._columns[self._space.slices[block.name]].zero_()
        return self._columns
