"""Blocks of a piece of a parameter: what a rank that holds some of its rows has of a block.

The entries keep their order. That is a view of the piece where the block's rows in it are a box of its axes:
always for rows that lie together, and for interleaved ones (h, 3, k) where ranks hold whole heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from curvescope.core.blocks import Block
from curvescope.core.errors import UsageError
from curvescope.core.ranks.spread import leading_axes, narrowed


def local_block(block: Block, shape: Sequence[int], rows: range) -> Block:
    """The block's entries in some rows of its parameter, as a view of these rows.

    Args:
        block: A view of the whole parameter.
        shape: Of the whole parameter.
        rows: The rows of the piece.
    """
    leading = leading_axes(block, shape)
    starts, sizes = narrowed(block)
    ahead = 0  # axes in front of which a single entry is left
    while ahead < leading - 1 and sizes[ahead] == 1:
        ahead += 1
    before = sum(starts[a] * prod(block.split[a + 1 : leading]) for a in range(ahead))
    order = block.order or tuple(range(len(block.split)))
    together = _together(order, range(ahead, leading))
    if together and sizes[ahead + 1 : leading] == list(block.split[ahead + 1 : leading]):
        unit, joined = 1, range(ahead, leading)  # one axis of rows
    else:
        unit, joined = prod(block.split[ahead + 1 : leading]), range(ahead, ahead + 1)
    stride = prod(block.split[ahead + 1 : leading])
    first, last = before + starts[ahead] * stride, before + (starts[ahead] + sizes[ahead]) * stride
    low, high = max(first, rows.start), max(min(last, rows.stop), max(first, rows.start))
    if any(edge % unit for edge in (rows.start, rows.stop, low - rows.start, high - rows.start)):
        raise UsageError(
            f"the rows of {block.name} are not in one piece on a rank: {block.parameter} of {shape[0]} rows "
            f"is cut inside a group of {unit}",
            hint="take a number of ranks that divides the number of heads",
        )
    rest = list(range(joined.stop, len(block.split)))
    axes = [joined.start, *rest]
    split = (len(rows) // unit, *(block.split[a] for a in rest))
    cut = {0: (min(low - rows.start, len(rows)) // unit, (high - low) // unit)}
    cut |= {i: (starts[a], sizes[a]) for i, a in enumerate(axes) if i and sizes[a] != block.split[a]}
    own = tuple(axes.index(a) for a in order if a in axes)
    lengths = [cut.get(i, (0, size))[1] for i, size in enumerate(split)]
    return Block(
        block.name,
        block.parameter,
        split=split,
        shape=_grouped(block, [sizes[a] for a in order], order, axes, [lengths[i] for i in own]),
        order=None if own == tuple(range(len(own))) else own,
        narrow=tuple((i, start, length) for i, (start, length) in cut.items() if length != split[i]),
    )


def _together(order: Sequence[int], axes: range) -> bool:
    """Whether axes stand next to each other, in their order."""
    place = order.index(axes.start)
    return tuple(order[place : place + len(axes)]) == tuple(axes)


def _grouped(
    block: Block, sizes: list[int], order: Sequence[int], axes: list[int], lengths: list[int]
) -> tuple[int, ...]:
    """The block's shape where its rows are fewer: lengths (in their order) for the axes that are left."""
    left, found, i = iter(lengths), [], 0
    for whole in block.shape:
        count, here = 1, 1
        while i < len(order) and (count < whole or sizes[i] == 1):
            count *= sizes[i]
            here *= next(left) if order[i] in axes else 1
            i += 1
        found.append(here)
    return tuple(found) if prod(found) == prod(lengths) else (prod(lengths), *(1 for _ in block.shape[1:]))
