"""The data of a problem as inputs and output gradients of its linear layers, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from torch import Tensor

from curvescope.core.blocks import Block
from curvescope.core.progress import track
from curvescope.data.batches import Batch
from curvescope.engines.memory import directions_per_pass, result_bytes
from curvescope.engines.vjp import pull
from curvescope.operators.kronecker.cotangents import Curvature
from curvescope.operators.kronecker.layer_recording import Recorded, Use, record
from curvescope.operators.kronecker.layers import (
    UNUSED,
    BlockUse,
    KroneckerLayer,
    LayerSearch,
    Rows,
    block_uses,
    find_layers,
    merged,
    mixed_use_error,
    probe_gradients,
    side_inputs,
    side_outputs,
)
from curvescope.problem import Problem

Sides = dict[bool, Tensor]
"""By whether the block is used transposed: inputs (B, R, side), or output gradients (k, B, R, side)."""


@dataclass(frozen=True)
class Piece:
    """Some sequences, recorded: rows of every use belong to one sequence each."""

    problem: Problem
    batch: Batch
    first: int
    recorded: Recorded
    rows: list[Rows]
    layers: tuple[KroneckerLayer, ...]
    group: int

    def places(self, layer: KroneckerLayer) -> list[BlockUse]:
        """Return the uses of the layer's weights, or of its bias; some pieces have none."""
        return _places(layer.blocks[0], self.recorded)

    def inputs(self, layer: KroneckerLayer) -> Sides:
        """a, with 1 behind it for a bias, zero where a sequence has no row."""
        return side_inputs(layer, self.places(layer), self.recorded.uses, self.rows, self.problem.dtype)

    def counts(self, layer: KroneckerLayer) -> dict[bool, Tensor]:
        """Rows of each sequence, (B,), by orientation."""
        found: dict[bool, Tensor] = {}
        for place in self.places(layer):
            rows_of_use = self.rows[place.use].present.sum(1)
            found[place.transposed] = found.get(place.transposed, 0) + rows_of_use
        return found

    def gradients(self, curvature: Curvature) -> Iterator[list[Sides]]:
        """g of every layer, for some cotangents after the others."""
        z, edges = self.recorded.outputs, [use.edge for use in self.recorded.uses]
        if not edges:
            return
        for u in track(curvature.chunks(self.problem, z, self.batch, self.first, self.group), "factors"):
            gradients_ = pull([z], [u], edges, len(u))  # pyright: ignore[reportArgumentType]
            flat = [
                rows.take(self._zero(use, len(u)) if g is None else g.flatten(1, -2))
                for use, g, rows in zip(self.recorded.uses, gradients_, self.rows, strict=True)
            ]
            yield [side_outputs(layer, self.places(layer), flat) for layer in self.layers]

    def _zero(self, use: Use, k: int) -> Tensor:
        return self.recorded.outputs.new_zeros(k, prod(use.lead), use.weight.shape[-1])


def search_layers(
    problem: Problem, blocks: Sequence[Block], curvature: Curvature, *, joint: bool
) -> LayerSearch:
    """The blocks that are linear maps: on the first sequence that counts, and on all data until each is used.

    A curvature that the loss does not have raises here, before the work. Weights of `nn.Linear` that have no
    role are laid out inputs × outputs in what is found, as those with a role are.
    """
    blocks = [problem.model.inputs_first(block) for block in blocks]
    singles = (batch[i : i + 1] for batch in problem.batches for i in range(batch.num_sequences))
    single = next(s for s in singles if problem.loss.total_weight(s.targets, s.weights) > 0).map(
        problem.placed
    )
    search = LayerSearch((), {block.name: UNUSED for block in blocks})
    for i, batch in enumerate(chain([single], problem.placed_batches("layers"))):
        recorded = record(problem, batch)
        if i == 0 and curvature.kind != "forward-only":
            next(curvature.chunks(problem, recorded.outputs, single, 0, 1), None)
        probe = probe_gradients(problem, recorded, batch, (block.parameter for block in blocks))
        local = find_layers(blocks, _shapes(recorded), recorded, probe, joint=joint)
        search = merged(blocks, search, local)
        if UNUSED not in search.left_out.values():
            break
    return search


def pieces(
    problem: Problem, layers: tuple[KroneckerLayer, ...], what: str, *, joint: bool
) -> Iterator[Piece]:
    """All data: batches as they are, or single sequences where a module does one thing for all of them."""
    first, group = 0, None
    for every in problem.placed_batches(what):
        for batch, recorded, rows in _recorded(problem, layers, every, joint=joint):
            if group is None:
                size = result_bytes(lambda batch=batch: problem.outputs(batch))[1]
                group = directions_per_pass(problem, size)
            yield Piece(problem, batch, first, recorded, rows, layers, group)
            first += batch.num_sequences


def _recorded(
    problem: Problem, layers: tuple[KroneckerLayer, ...], batch: Batch, *, joint: bool
) -> Iterator[tuple[Batch, Recorded, list[Rows]]]:
    recorded = record(problem, batch)
    blocks = [block for layer in layers for block in layer.blocks]
    probe = probe_gradients(problem, recorded, batch, (block.parameter for block in blocks))
    search = find_layers(blocks, _shapes(recorded), recorded, probe, joint=joint)
    mixed = [name for name, why in search.left_out.items() if why != UNUSED]
    mixed += [layer.name for layer in search.layers if layer not in layers]
    if mixed:
        raise mixed_use_error(mixed[0])
    ours = {place.use for block in blocks for place in _places(block, recorded)}
    if any(probe.rows[use] is None for use in ours):
        assert batch.num_sequences > 1, "rows of one sequence belong to it"
        for i in range(batch.num_sequences):
            yield from _recorded(problem, layers, batch[i : i + 1], joint=joint)
        return
    uses = [recorded.uses[use] for use in sorted(ours)]
    yield batch, recorded._replace(uses=uses), [_narrow(probe.rows[use]) for use in sorted(ours)]


def _places(block: Block, recorded: Recorded) -> list[BlockUse]:
    """Return the uses of a block that is a linear map."""
    uses = block_uses(block, tuple(recorded.leaves[block.parameter].shape), recorded.uses)
    assert uses is not None, "looked at when layers were found"
    return uses


def _narrow(rows: Rows | None) -> Rows:
    assert rows is not None
    return rows


def _shapes(recorded: Recorded) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in recorded.leaves.items()}
