"""Stream the data of a problem as inputs and output gradients of its linear layers."""

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
from curvescope.operators.kronecker.layer_recording import RecordedBatch, Use, record
from curvescope.operators.kronecker.layers import (
    UNUSED,
    BlockUse,
    KroneckerLayer,
    LayerSearch,
    SequenceRows,
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
"""Inputs (B, R, side) or output gradients (k, B, R, side), by whether the block is used transposed."""


@dataclass(frozen=True)
class SequenceGroup:
    """Recorded sequences; each row of a use belongs to one sequence."""

    problem: Problem
    batch: Batch
    first: int
    recorded: RecordedBatch
    rows: list[SequenceRows]
    layers: tuple[KroneckerLayer, ...]
    group: int

    def uses_of(self, layer: KroneckerLayer) -> list[BlockUse]:
        """Return the uses of the layer's weights, or of its bias; some sequence_groups have none."""
        return _uses_of(layer.blocks[0], self.recorded)

    def inputs(self, layer: KroneckerLayer) -> Sides:
        """Inputs a, followed by 1 for a joint bias, and zero for missing rows."""
        return side_inputs(layer, self.uses_of(layer), self.recorded.uses, self.rows, self.problem.dtype)

    def counts(self, layer: KroneckerLayer) -> dict[bool, Tensor]:
        """Number of rows of each sequence, (B,), by orientation."""
        counts: dict[bool, Tensor] = {}
        for use in self.uses_of(layer):
            rows_of_use = self.rows[use.use].present.sum(1)
            counts[use.transposed] = counts.get(use.transposed, 0) + rows_of_use
        return counts

    def gradients(self, curvature: Curvature) -> Iterator[list[Sides]]:
        """Yield g of every layer, for groups of cotangents."""
        z, edges = self.recorded.outputs, [use.edge for use in self.recorded.uses]
        if not edges:
            return
        for u in track(curvature.chunks(self.problem, z, self.batch, self.first, self.group), "factors"):
            gradients_ = pull([z], [u], edges, len(u))  # pyright: ignore[reportArgumentType]
            flat = [
                rows.take(self._zero(use, len(u)) if g is None else g.flatten(1, -2))
                for use, g, rows in zip(self.recorded.uses, gradients_, self.rows, strict=True)
            ]
            yield [side_outputs(layer, self.uses_of(layer), flat) for layer in self.layers]

    def _zero(self, use: Use, k: int) -> Tensor:
        return self.recorded.outputs.new_zeros(k, prod(use.lead), use.weight.shape[-1])


def search_layers(
    problem: Problem, blocks: Sequence[Block], curvature: Curvature, *, joint: bool
) -> LayerSearch:
    """Find the blocks that are linear maps, from the first counted sequence, or from more if some are unused.

    It raises if the loss does not have this curvature. Weights of `nn.Linear` without a role are also laid
    out inputs × outputs, like those with a role.
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


def sequence_groups(
    problem: Problem, layers: tuple[KroneckerLayer, ...], what: str, *, joint: bool
) -> Iterator[SequenceGroup]:
    """Yield all data: complete batches, or single sequences if the module has rows for several sequences."""
    first_sequence, group = 0, None
    for every in problem.placed_batches(what):
        for batch, recorded, rows in _recorded(problem, layers, every, joint=joint):
            if group is None:
                size = result_bytes(lambda batch=batch: problem.outputs(batch))[1]
                group = directions_per_pass(problem, size)
            yield SequenceGroup(problem, batch, first_sequence, recorded, rows, layers, group)
            first_sequence += batch.num_sequences


def _recorded(
    problem: Problem, layers: tuple[KroneckerLayer, ...], batch: Batch, *, joint: bool
) -> Iterator[tuple[Batch, RecordedBatch, list[SequenceRows]]]:
    recorded = record(problem, batch)
    blocks = [block for layer in layers for block in layer.blocks]
    probe = probe_gradients(problem, recorded, batch, (block.parameter for block in blocks))
    search = find_layers(blocks, _shapes(recorded), recorded, probe, joint=joint)
    mixed_uses = [name for name, why in search.left_out.items() if why != UNUSED]
    mixed_uses += [layer.name for layer in search.layers if layer not in layers]
    if mixed_uses:
        raise mixed_use_error(mixed_uses[0])
    layer_uses = {block_use.use for block in blocks for block_use in _uses_of(block, recorded)}
    if any(probe.rows[use] is None for use in layer_uses):
        assert batch.num_sequences > 1, "rows of one sequence belong to it"
        for i in range(batch.num_sequences):
            yield from _recorded(problem, layers, batch[i : i + 1], joint=joint)
        return
    uses = [recorded.uses[use] for use in sorted(layer_uses)]
    yield batch, recorded._replace(uses=uses), [_narrow(probe.rows[use]) for use in sorted(layer_uses)]


def _uses_of(block: Block, recorded: RecordedBatch) -> list[BlockUse]:
    """Return the uses of a block that is a linear map."""
    uses = block_uses(block, tuple(recorded.leaves[block.parameter].shape), recorded.uses)
    assert uses is not None, "checked when the layers were found"
    return uses


def _narrow(rows: SequenceRows | None) -> SequenceRows:
    assert rows is not None
    return rows


def _shapes(recorded: RecordedBatch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in recorded.leaves.items()}
