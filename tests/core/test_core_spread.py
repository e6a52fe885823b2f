"""Pieces of vectors: the entries of a block that lie in a rank's rows, in the order of the whole."""

from __future__ import annotations

import pytest
import torch

from curvescope.core.blocks import Block, ParamSpace, parameter_block
from curvescope.core.errors import UsageError
from curvescope.core.ranks.shard_layout import ShardGroup, VectorShard
from curvescope.distributed.sharding import local_block

SHAPES = {
    "plain": (7, 3),
    "linear": (5, 4),
    "conv": (6, 24),
    "rows": (24, 6),
    "bias": (24,),
    "neox": (24, 6),
    "b": (2,),
}
BLOCKS = (
    parameter_block("plain", "plain", (7, 3)),
    parameter_block("linear", "linear", (5, 4), transposed=True),
    Block("conv.q", "conv", (6, 3, 2, 4), (6, 8), narrow=((1, 1, 1),)),
    Block("conv.h", "conv", (6, 3, 2, 4), (6, 4), narrow=((1, 2, 1), (2, 1, 1))),
    Block("rows.q", "rows", (3, 2, 4, 6), (6, 8), order=(3, 0, 1, 2), narrow=((0, 2, 1),)),
    Block("rows.h", "rows", (3, 2, 4, 6), (6, 4), order=(3, 0, 1, 2), narrow=((0, 1, 1), (1, 1, 1))),
    Block("bias.q", "bias", (3, 2, 4), (8,), narrow=((0, 1, 1),)),
    Block("neox.q", "neox", (2, 3, 4, 6), (6, 8), order=(3, 0, 1, 2), narrow=((1, 1, 1),)),
    parameter_block("b", "b", (2,)),
)


def pieces(rank: int, ranks: int) -> VectorShard:
    return VectorShard(ShardGroup(None, rank, ranks), BLOCKS, SHAPES)


@pytest.mark.parametrize("ranks", [1, 2])
def test_pieces_and_local_blocks_have_the_same_entries_in_the_order_of_the_whole(ranks):
    whole_space = ParamSpace(BLOCKS, SHAPES, torch.float64, torch.device("cpu"))
    tree = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    vector, seen = whole_space.gather(tree), []
    for rank in range(ranks):
        here = pieces(rank, ranks)
        rows = {name: here.spread.rows(shape[0]) for name, shape in SHAPES.items()}
        own = {name: tree[name][r.start : r.stop] for name, r in rows.items()}
        blocks = tuple(local_block(b, SHAPES[b.parameter], rows[b.parameter]) for b in BLOCKS)
        space = ParamSpace(
            blocks, {k: tuple(v.shape) for k, v in own.items()}, torch.float64, whole_space.device
        )
        assert space.size == here.size
        positions = here.positions()
        assert torch.equal(positions, positions.sort().values)
        assert torch.equal(space.gather(own), vector[positions])
        seen.append(positions)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(whole_space.size))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 30])
@pytest.mark.parametrize("cut", [1, 10, 10_000])
def test_what_is_kept_does_not_depend_on_how_the_stream_comes(ranks, cut):
    stream, found = torch.arange(pieces(0, 1).length), []
    for rank in range(ranks):
        here = pieces(rank, ranks)
        out = torch.full((here.size,), -1)
        here.write_local(iter(stream.split(cut)), out)
        assert torch.equal(out, here.positions())
        assert [b.name for b in BLOCKS if here.block(b.name).length != b.size] == []
        found.append(out)
    assert torch.equal(torch.cat(found).sort().values, stream)


def test_rows_that_a_rank_does_not_hold_in_one_box_are_refused():
    neox = next(b for b in BLOCKS if b.name == "neox.q")
    with pytest.raises(UsageError, match="cut inside a group of 12"):
        local_block(neox, SHAPES["neox"], range(8))


def test_shapes_of_local_blocks_stay_matrices():
    found = [
        local_block(b, SHAPES[b.parameter], ShardGroup(None, 1, 2).rows(SHAPES[b.parameter][0]))
        for b in BLOCKS
    ]
    assert [b.shape for b in found] == [(3, 3), (4, 2), (3, 8), (3, 4), (6, 8), (6, 4), (4,), (6, 4), (1,)]
