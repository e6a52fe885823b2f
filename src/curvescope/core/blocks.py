"""Blocks and spaces: the entries of parameters that a vector contains.

A block is a named view of one parameter. A block that is named by its role has the layout inputs × outputs,
row-major, for every layout of the parameter itself: `L3.W_Q` may be the first third of the columns of a
packed matrix, and `L3.h5.W_Q` one head of it. A block with the name of a parameter has that parameter's
layout.

A space maps flat vectors to parameters and back. There are two orders. A vector over all trained parameters
of a problem is in torch's order, that of `torch.nn.utils.parameters_to_vector`. A vector over blocks chosen
by name has one block after the other, each row-major. `ParamSpace.convert` converts between the two.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import prod
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError, near_misses


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

    @cached_property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    @cached_property
    def is_whole(self) -> bool:
        """Return True if the block is its complete parameter, possibly with permuted axes."""
        shape = self.split if self.order is None else tuple(self.split[i] for i in self.order)
        return not self.narrow and shape == self.shape

    def unpermuted(self, matrix: Tensor) -> Tensor:
        """The matrix of a whole block with the parameter's order of axes: a view of shape `split`."""
        if self.order is None:
            return matrix
        return matrix.permute([self.order.index(axis) for axis in range(len(self.order))])

    def view(self, parameter: Tensor, lead: int = 0) -> Tensor:
        """Entries of this block as a strided view that shares memory with `parameter`.

        Args:
            lead: Number of batch axes in front of the parameter's own; they stay in front.
        """
        x = parameter.view((*parameter.shape[:lead], *self.split))
        for axis, start, length in self.narrow:
            x = x.narrow(lead + axis, start, length)
        return x if self.order is None else x.permute((*range(lead), *(lead + axis for axis in self.order)))

    def take(self, parameter: Tensor, lead: int = 0) -> Tensor:
        """The block's matrix, `shape`; a copy if the layout requires one. Differentiable."""
        return self.view(parameter, lead).reshape((*parameter.shape[:lead], *self.shape))

    def put(self, matrix: Tensor, parameter: Tensor, lead: int = 0) -> None:
        """Write `matrix` (`size` entries) to the block's entries of `parameter`."""
        target = self.view(parameter, lead)
        target.copy_(matrix.reshape(target.shape))

    def positions(self, parameter_shape: Sequence[int]) -> Tensor:
        """Flat positions of the block's entries in its parameter, in the block's order: (size,)."""
        return self.take(torch.arange(prod(parameter_shape)).view(*parameter_shape)).flatten()


def parameter_block(name: str, parameter: str, shape: Sequence[int], *, transposed: bool = False) -> Block:
    """Block of a complete parameter; `transposed` for a weight stored outputs × inputs."""
    shape = tuple(shape)
    if transposed:
        return Block(name, parameter, split=shape, order=(1, 0), shape=(shape[1], shape[0]))
    return Block(name, parameter, split=shape, shape=shape)


def by_role(blocks: Iterable[Block]) -> dict[str, list[Block]]:
    """Blocks grouped by their role in all layers, in order: `L*.W_Q`, `L*.expert*.W_in`."""
    groups: dict[str, list[Block]] = {}
    for block in blocks:
        groups.setdefault(re.sub(r"^L\d+\.(expert\d+\.)?", _starred, block.name), []).append(block)
    return groups


def _starred(front: re.Match[str]) -> str:
    """`L*.` for `L3.`, `L*.expert*.` for `L3.expert5.`."""
    return "L*.expert*." if front[1] else "L*."


def as_tensor(values: Tensor | np.ndarray) -> Tensor:
    """Return a tensor unchanged; copy a NumPy array of real numbers in any layout."""
    if isinstance(values, Tensor):
        return values
    if not isinstance(values, np.ndarray):
        raise ShapeError(f"expected a tensor or a NumPy array, got {type(values).__name__}")
    if values.dtype.kind not in "fiu":
        raise ShapeError(f"expected an array of real numbers, got one of {values.dtype}")
    plain = values.dtype.newbyteorder("=") if values.dtype.itemsize <= 8 else np.dtype(np.float64)
    return torch.tensor(np.ascontiguousarray(values, dtype=plain))


def _to_one_dtype(parts: Mapping[str, Tensor | np.ndarray]) -> dict[str, Tensor]:
    """Convert to tensors of one dtype that can represent all of them."""
    tensors = {name: as_tensor(part) for name, part in parts.items()}
    if len({x.dtype for x in tensors.values()}) < 2:
        return tensors
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors.values()))
    return {name: x.to(dtype) for name, x in tensors.items()}


@dataclass(frozen=True)
class ParamSpace:
    """Space of flat vectors over blocks that do not overlap.

    A vector consists of `segments`, one after the other, each row-major: the parameters in `whole`, in the
    order of the module and in their own layout, and the blocks of all other parameters. Without `whole`
    parameters, the segments are the blocks in their order.

    Args:
        blocks: Named views of parameters.
        shapes: Shape of every parameter that has a block, in the module's order.
        whole: Parameters that are completely covered by blocks and stored in torch's layout.
    """

    blocks: tuple[Block, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    whole: frozenset[str] = frozenset()

    @cached_property
    def segments(self) -> tuple[Block, ...]:
        """Contiguous parts of a vector, in order."""
        if not self.whole:
            return self.blocks
        blocks_of: dict[str, list[Block]] = {}
        for block in self.blocks:
            blocks_of.setdefault(block.parameter, []).append(block)
        segments: list[Block] = []
        for name, shape in self.shapes.items():
            segments += (
                [parameter_block(name, name, shape)] if name in self.whole else blocks_of.get(name, [])
            )
        return tuple(segments)

    @cached_property
    def size(self) -> int:
        """Length n of a vector."""
        return sum(segment.size for segment in self.segments)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Positions of the segments in a vector, by name, in order."""
        slices, start = {}, 0
        for segment in self.segments:
            slices[segment.name] = slice(start, start + segment.size)
            start += segment.size
        return slices

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters that have blocks, in the module's order."""
        return tuple(self._segments_of)

    @cached_property
    def _segments_of(self) -> dict[str, list[Block]]:
        """Segments of each parameter, in the module's order."""
        segments_of: dict[str, list[Block]] = {name: [] for name in self.shapes}
        for segment in self.segments:
            segments_of[segment.parameter].append(segment)
        return {name: segments for name, segments in segments_of.items() if segments}

    @property
    def hint(self) -> str:
        """Hint for errors: how to make a vector of this space."""
        if self.whole:
            return "torch.nn.utils.parameters_to_vector of the parameters in space.parameter_names fits"
        return "space.from_dict(parts) makes one from blocks, space.gather(tree) from parameters"

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    # --------------------------------------------------------------------------------- blocks of a vector

    def in_blocks(self) -> ParamSpace:
        """The same entries, one block after the other in the blocks' own layout."""
        return replace(self, whole=frozenset()) if self.whole else self

    def only(self, names: Collection[str]) -> ParamSpace:
        """Space of some of the blocks, in the same order."""
        blocks = tuple(block for block in self.blocks if block.name in names)
        chosen = {block.parameter for block in blocks}
        others = {block.parameter for block in self.blocks if block.name not in names}
        shapes = {name: shape for name, shape in self.shapes.items() if name in chosen}
        return replace(self, blocks=blocks, shapes=shapes, whole=(self.whole & chosen) - others)

    def view(self, columns: Tensor, block: Block) -> Tensor:
        """Entries of a block in columns (n, k), as a writable view (*block's axes, k).

        Args:
            block: One of `blocks`, or any view of a parameter that is stored in torch's layout.
        """
        segments = self._segments_of[block.parameter]
        segment = next((candidate for candidate in segments if candidate.name == block.name), segments[0])
        assert segment == block or (segment.is_whole and segment.order is None), f"{block.name} is missing"
        rows, k = columns[self.slices[segment.name]], columns.shape[1]
        if segment == block:
            return rows.view(*block.shape, k)
        stored = rows.view(*self.shapes[block.parameter], k).movedim(-1, 0)
        return block.view(stored, 1).movedim(0, -1)

    def positions(self, block: Block) -> Tensor:
        """Positions of the entries of a block in a vector, in the block's order: (size,)."""
        return self.view(torch.arange(self.size)[:, None], block).flatten()

    def to_dict(self, vector: Tensor | np.ndarray) -> dict[str, Tensor]:
        """Blocks of a vector by name, each in its own shape; they may share memory with the vector."""
        columns = self._as_vector(vector)[:, None]
        return {block.name: self.view(columns, block).reshape(block.shape) for block in self.blocks}

    def from_dict(self, parts: Mapping[str, Tensor | np.ndarray]) -> Tensor:
        """Vector with the given blocks, each in its own shape or flat; the inverse of `to_dict`.

        All blocks must be given, and no others.
        """
        names = [block.name for block in self.blocks]
        for name in parts:
            if name not in names:
                raise UsageError(
                    f"the space has no block called {name!r}", hint=near_misses(str(name), names)
                )
        for block in self.blocks:
            got = tuple(parts[block.name].shape) if block.name in parts else "nothing"
            if got not in (block.shape, (block.size,)):
                raise ShapeError(f"expected block {block.name!r} of shape {block.shape}, got {got}")
        blocks = _to_one_dtype({name: parts[name] for name in names})
        if not self.whole:
            return torch.cat([blocks[name].reshape(-1) for name in names])
        vector = blocks[names[0]].new_empty(self.size)
        for block in self.blocks:
            target = self.view(vector[:, None], block)
            target.copy_(blocks[block.name].reshape(target.shape))
        return vector

    def convert(self, vector: Any, to: ParamSpace) -> Any:
        """Reorder a vector (n,), or columns (n, k), of this space for another space with the same entries.

        A NumPy array gives a NumPy array.
        """
        if to.size != self.size:
            raise ShapeError(f"expected a space of the same {self.size} entries, got one of {to.size}")
        if not self._has_entries_of(to):
            raise UsageError("expected a space of the same entries, got one of other entries")
        given = as_tensor(vector)
        columns = given[:, None] if given.dim() == 1 else given
        self._check_length(columns)
        converted = to.gather_columns(self.scatter_columns(columns), columns.shape[1])
        converted = converted[:, 0] if given.dim() == 1 else converted
        return converted.numpy() if isinstance(vector, np.ndarray) else converted

    def _has_entries_of(self, other: ParamSpace) -> bool:
        """Return True if both spaces have the same entries of the same parameters, in any order."""
        return self._segments_of.keys() == other._segments_of.keys() and all(
            segments == other._segments_of[name] or torch.equal(self._mask(name), other._mask(name))
            for name, segments in self._segments_of.items()
        )

    def _mask(self, parameter: str) -> Tensor:
        """Mask of the entries of a parameter that are in the space."""
        mask = torch.zeros(self.shapes[parameter], dtype=torch.bool)
        for segment in self._segments_of[parameter]:
            segment.view(mask).fill_(True)
        return mask

    # --------------------------------------------------------------------------------- vectors and parameters

    def gather(self, tree: Mapping[str, Tensor | np.ndarray]) -> Tensor:
        """Vector (n,) of parameter-shaped tensors by name; a missing parameter counts as zero."""
        present = {name: tree[name] for name in self.parameter_names if name in tree}
        for name, x in present.items():
            if tuple(x.shape) != tuple(self.shapes[name]):
                raise ShapeError(f"{name}: expected {tuple(self.shapes[name])}, got {tuple(x.shape)}")
        tensors = {name: x.contiguous()[None] for name, x in _to_one_dtype(present).items()}
        return self.gather_columns(tensors, 1)[:, 0]

    def gather_columns(self, tree: Mapping[str, Tensor], k: int) -> Tensor:
        """Columns (n, k) of tensors (k, *parameter shape) by name."""
        present = next((tree[name] for name in self.parameter_names if name in tree), None)
        like = torch.empty(0, dtype=self.dtype, device=self.device) if present is None else present
        columns = like.new_empty(self.size, k)
        for segment in self.segments:
            rows = columns[self.slices[segment.name]]  # not columns.split: its views cannot be written to
            if segment.parameter not in tree:
                rows.zero_()
                continue
            entries = segment.view(tree[segment.parameter], 1)
            rows.view(*entries.shape[1:], k).movedim(-1, 0).copy_(entries)
        return columns

    def total(self, k: int) -> ColumnSum:
        """Start a sum of columns (n, k) to which terms are added parameter by parameter."""
        return ColumnSum(self, self._segments_of, k)

    def scatter(self, vector: Tensor | np.ndarray) -> dict[str, Tensor]:
        """Parameter-shaped tensors with the entries of `vector` (n,), and zero outside the blocks."""
        vector = self._as_vector(vector)
        tree = {
            name: torch.zeros(self.shapes[name], dtype=vector.dtype, device=vector.device)
            for name in self.parameter_names
        }
        for segment, part in zip(self.segments, self._parts(vector), strict=True):
            segment.put(part, tree[segment.parameter])
        return tree

    def scatter_columns(self, columns: Tensor) -> dict[str, Tensor]:
        """Scatter each column of (n, k) over the parameters: tensors (k, *parameter shape) by name.

        For a single column, a parameter that is one segment shares the column's memory.
        """
        if columns.shape[1] == 0:
            return {name: columns.new_zeros(0, *self.shapes[name]) for name in self.parameter_names}
        if columns.shape[1] == 1:
            return {name: value[None] for name, value in self._scattered_views(columns[:, 0]).items()}
        tree = {
            name: columns.new_zeros(columns.shape[1], *self.shapes[name]) for name in self.parameter_names
        }
        for segment, part in zip(self.segments, self._parts(columns), strict=True):
            segment.put(part.T, tree[segment.parameter], 1)
        return tree

    def _scattered_views(self, vector: Tensor) -> dict[str, Tensor]:
        parts = dict(zip(self.slices, self._parts(vector.contiguous()), strict=True))
        tree = {}
        for name, segments in self._segments_of.items():
            first = segments[0]
            if first.is_whole:
                tree[name] = first.unpermuted(parts[first.name].view(first.shape)).reshape(self.shapes[name])
                continue
            tree[name] = vector.new_zeros(self.shapes[name])
            for segment in segments:
                segment.put(parts[segment.name], tree[name])
        return tree

    def _parts(self, columns: Tensor) -> tuple[Tensor, ...]:
        """Rows of columns, or entries of a vector, that belong to each segment."""
        self._check_length(columns)
        return columns.split([segment.size for segment in self.segments])

    def _as_vector(self, vector: Tensor | np.ndarray) -> Tensor:
        """One vector (n,) as a tensor."""
        one = as_tensor(vector)
        if one.dim() != 1:
            raise ShapeError(
                f"expected a vector of {self.size} entries, got {tuple(one.shape)}", hint=self.hint
            )
        self._check_length(one)
        return one

    def _check_length(self, columns: Tensor) -> None:
        if columns.shape[0] != self.size:
            raise ShapeError(
                f"expected a vector of {self.size} entries, got {tuple(columns.shape)}", hint=self.hint
            )


@final
class ColumnSum:
    """Sum of columns (n, k) over a space: the first term of a parameter is copied, later ones are added."""

    def __init__(self, space: ParamSpace, segments: Mapping[str, list[Block]], k: int):
        self._space, self._segments, self._parameters_with_terms = space, segments, set[str]()
        self._columns = torch.empty(space.size, k, dtype=space.dtype, device=space.device)

    def add(self, parameter: str, x: Tensor) -> None:
        """Add a term (k, *shape) of one parameter."""
        for segment in self._segments[parameter]:
            entries, rows = segment.view(x, 1), self._columns[self._space.slices[segment.name]]
            target = rows.view(*entries.shape[1:], len(x)).movedim(-1, 0)
            target.add_(entries) if parameter in self._parameters_with_terms else target.copy_(entries)
        self._parameters_with_terms.add(parameter)

    def result(self) -> Tensor:
        """Return the sum; it is zero for parameters without a term."""
        for segment in self._space.segments:
            if segment.parameter not in self._parameters_with_terms:
                self._columns[self._space.slices[segment.name]].zero_()
        return self._columns
