"""Blocks as linear layers: the positions of the model's blocks in recorded linear maps.

A block is m × n, inputs × outputs. A use of it contributes Σ_rows a gᵀ to its gradient, or Σ_rows g aᵀ if it
is used transposed, like a tied embedding in the unembedding. A use may contain more than the block (a packed
matrix) or a part of it. A bias is the row for the input 1, in a joint layer (m + 1) × n with its weights, or
as a separate layer.

The module also determines the sequence of each row of a linear map. A row of y = a W belongs to sequence n if
the loss of n depends on it. Each reverse pass has cotangents for half of the sequences. So the passes that
reach a row are the binary digits of its sequence's number, and their complements. Rows without a gradient,
such as padding, are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvescope.core.blocks import Block
from curvescope.core.errors import CurvescopeError
from curvescope.data.batches import Batch
from curvescope.engines.vjp import pull
from curvescope.operators.kronecker.layer_recording import RecordedBatch, Use, View
from curvescope.problem import Problem

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}  # relative: two orders of the same operations
EXPERTS = re.compile(r"\.expert\d+\.")  # in names of blocks
EXPERT = "an expert only gets some of the tokens, for which factors are not supported"
UNUSED = "no sequence uses it"
NOT_LINEAR = "it is not the weight or bias of a linear layer"
Side = tuple[Tensor, Tensor]
"""Inputs (or outputs) of a use, and their positions among the rows or columns of a block."""


class Overlap(NamedTuple):
    """Overlap of a block with a use; rows of the block are outputs if `transposed`. A bias has no inputs."""

    transposed: bool
    inputs: Side | None
    outputs: Side


class BlockUse(NamedTuple):
    """A use of a block."""

    use: int
    transposed: bool
    inputs: Side | None
    outputs: Side


@dataclass(frozen=True)
class KroneckerLayer:
    """Parameters that share a pair of factors: weights, a bias, or both; m × n as a matrix."""

    weight: Block | None
    bias: Block | None

    @property
    def name(self) -> str:
        """Name of the weights, or of a bias by itself."""
        return self.blocks[0].name

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Weights and bias, if present."""
        return tuple(block for block in (self.weight, self.bias) if block is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (m, n), with one row more for a joint bias."""
        m, n = (0, self.blocks[0].shape[-1]) if self.weight is None else self.weight.shape
        return m + (self.bias is not None), n


@dataclass(frozen=True)
class LayerSearch:
    """Layers of a selection of blocks, and reasons why other blocks have no factors."""

    layers: tuple[KroneckerLayer, ...]
    left_out: dict[str, str] = field(default_factory=dict)


def find_layers(
    blocks: Sequence[Block],
    shapes: dict[str, tuple[int, ...]],
    recorded: RecordedBatch,
    probe: GradientProbe,
    *,
    joint: bool,
) -> LayerSearch:
    """Find the blocks that are linear maps in a recorded batch; biases join their weights if `joint`."""
    uses_of, reasons = {}, {}
    for block in blocks:
        uses = block_uses(block, shapes[block.parameter], recorded.uses)
        if EXPERTS.search(block.name):
            reasons[block.name] = EXPERT
        elif uses == [] and not _has_gradient(block, probe):
            reasons[block.name] = UNUSED
        elif uses is None or not _adds_up(block, uses, recorded, probe):
            reasons[block.name] = NOT_LINEAR
        else:
            uses_of[block] = uses
    weights = {block: at for block, at in uses_of.items() if at and at[0].inputs is not None}
    biases = {block: at for block, at in uses_of.items() if block not in weights}
    layers, paired = {}, set()
    for block, at in weights.items():
        partner = next((b for b, bias_uses in biases.items() if joint and _is_bias_of(at, bias_uses)), None)
        layers[block] = KroneckerLayer(block, partner)
        paired.add(partner)
    layers |= {block: KroneckerLayer(None, block) for block in biases if block not in paired}
    return LayerSearch(tuple(layers[block] for block in uses_of if block in layers), reasons)


def merged(blocks: Sequence[Block], left: LayerSearch, right: LayerSearch) -> LayerSearch:
    """Merge the layers found in two parts of the data; a block must be a layer in both."""
    by_block = {block: layer for layer in left.layers for block in layer.blocks}
    for layer in right.layers:
        for block in layer.blocks:
            if by_block.setdefault(block, layer) != layer:
                raise mixed_use_error(block.name)
    why = {**left.left_out, **{name: why for name, why in right.left_out.items() if why != UNUSED}}
    shared = {block.name for block in by_block}
    if wrong := [name for name in shared if why.get(name, UNUSED) != UNUSED]:
        raise mixed_use_error(wrong[0])
    layers = dict.fromkeys(by_block[block] for block in blocks if block in by_block)
    return LayerSearch(tuple(layers), {name: reason for name, reason in why.items() if name not in shared})


def mixed_use_error(name: str) -> CurvescopeError:
    """Return the error for a block that is a linear map only in a part of the data."""
    return CurvescopeError(
        f"{name} is used in different ways in different sequences",
        hint="leave it out, or use bias='separate' if it is a bias that is only added in some sequences",
    )


def block_uses(block: Block, shape: tuple[int, ...], uses: Sequence[Use]) -> list[BlockUse] | None:
    """Return the uses of a block; None if a use contains other entries than some rows and columns."""
    block_uses_: list[BlockUse] = []
    for i, use in enumerate(uses):
        for view in (use.weight, use.bias):
            if view is None or view.parameter != block.parameter or len(view.shape) != len(block.shape):
                continue
            try:
                at = _overlap(block, view, shape)
            except ValueError:
                return None
            if at is not None:
                block_uses_.append(BlockUse(i, *at))
    return block_uses_


@lru_cache(maxsize=4096)
def _overlap(block: Block, view: View, shape: tuple[int, ...]) -> Overlap | None:
    """Positions of a block's entries in a view of its parameter; None if they do not overlap.

    Raises:
        ValueError: The entries are not a product of some rows and some columns of the view.
    """
    inside = torch.full((prod(shape),), -1)
    inside[view.positions().reshape(-1)] = torch.arange(prod(view.shape))
    at = inside[block.positions(shape)].reshape(block.shape)
    if bool((at < 0).all()):
        return None
    if at.dim() == 1:
        present = (at >= 0).nonzero()[:, 0]
        return Overlap(False, None, (at[present], present))
    rows, columns = (at >= 0).any(1).nonzero()[:, 0], (at >= 0).any(0).nonzero()[:, 0]
    cut, width = at[rows][:, columns], view.shape[1]
    i, j = cut[:, 0], cut[0]
    if torch.equal(cut, (i // width * width)[:, None] + j % width):
        return Overlap(False, (i // width, rows), (j % width, columns))
    if torch.equal(cut, (i % width)[:, None] + j // width * width):
        return Overlap(True, (j // width, columns), (i % width, rows))
    raise ValueError


def _is_bias_of(weight: list[BlockUse], bias: list[BlockUse]) -> bool:
    """Return True if the bias is added after every use of these weights, and nowhere else."""
    return len(weight) == len(bias) and all(
        w.use == b.use
        and not w.transposed
        and all(torch.equal(x, y) for x, y in zip(w.outputs, b.outputs, strict=True))
        for w, b in zip(weight, bias, strict=True)
    )


def _has_gradient(block: Block, probe: GradientProbe) -> bool:
    """Return True if the block has a gradient."""
    leaf = probe.leaf_gradients.get(block.parameter)
    return leaf is not None and bool(block.take(leaf).any())


def _adds_up(block: Block, block_uses: list[BlockUse], recorded: RecordedBatch, probe: GradientProbe) -> bool:
    """Return True if the recorded uses add up to the gradient of the block.

    The tolerance is relative to the sum of absolute values, because gradients of some biases (keys) are zero.
    """
    leaf = probe.leaf_gradients.get(block.parameter)
    outputs = recorded.outputs
    total, scale = torch.zeros(2, *block.shape, dtype=outputs.dtype, device=outputs.device)
    for place in block_uses:
        use, g = recorded.uses[place.use], probe.gradients[place.use]
        G = scatter_side(g, place.outputs, block.shape[0 if place.transposed else -1])
        if place.inputs is None:
            total, scale = total + G.sum(0), scale + G.abs().sum(0)
            continue
        a = scatter_side(use.inputs(g.dtype), place.inputs, block.shape[1 if place.transposed else 0])
        parts = [x.T @ y if place.transposed else y.T @ x for x, y in ((G, a), (G.abs(), a.abs()))]
        total, scale = total + parts[0], scale + parts[1]
    true = torch.zeros_like(total) if leaf is None else block.take(leaf)
    tolerance = TOLERANCE.get(total.dtype, 0.05)
    return bool(block_uses) and float((total - true).norm()) <= tolerance * float(scale.norm())


def scatter_side(x: Tensor, at: Side, size: int) -> Tensor:
    """Scatter the last axis to its positions in an axis of length `size`, zero elsewhere."""
    sources, targets = (index.to(x.device) for index in at)
    if len(targets) == size:  # positions of a complete side are in order
        return x.index_select(-1, sources)
    result = x.new_zeros(*x.shape[:-1], size)
    result[..., targets] = x.index_select(-1, sources)
    return result


def side_inputs(
    layer: KroneckerLayer,
    block_uses: list[BlockUse],
    uses: Sequence[Use],
    rows: list[SequenceRows],
    dtype: torch.dtype,
) -> dict[bool, Tensor]:
    """Inputs of a layer by sequence: a tensor (B, R, side) for each used orientation."""
    sides: dict[bool, list[Tensor]] = {}
    for use in block_uses:
        take = rows[use.use]
        if use.inputs is None:
            a = take.present[..., None].to(dtype)
        else:
            assert layer.weight is not None, "inputs belong to weights"
            size = layer.weight.shape[1 if use.transposed else 0]
            a = take.take(scatter_side(uses[use.use].inputs(dtype), use.inputs, size))
            if layer.bias is not None:
                a = torch.cat([a, take.present[..., None].to(dtype)], dim=-1)
        sides.setdefault(use.transposed, []).append(a)
    return {key: torch.cat(parts, dim=1) for key, parts in sides.items()}


def side_outputs(
    layer: KroneckerLayer, block_uses: list[BlockUse], gradients: Sequence[Tensor]
) -> dict[bool, Tensor]:
    """Gradients of a layer's outputs, (k, B, R, side), in the order of `side_inputs`."""
    sides: dict[bool, list[Tensor]] = {}
    for use in block_uses:
        size = layer.blocks[0].shape[0 if use.transposed else -1]
        sides.setdefault(use.transposed, []).append(scatter_side(gradients[use.use], use.outputs, size))
    return {key: torch.cat(parts, dim=2) for key, parts in sides.items()}


GOLDEN = 0.6180339887498949  # its multiples do not repeat, modulo 1


class SequenceRows(NamedTuple):
    """Rows of a use by sequence: positions (B, R), and a mask, because some sequences have fewer rows."""

    at: Tensor
    present: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Reorder (…, rows, d) to (…, B, R, d), with zero for missing rows."""
        if not x.shape[-2]:  # an expert without tokens
            return x.new_zeros(*x.shape[:-2], *self.at.shape, x.shape[-1])
        values = x.index_select(-2, self.at.reshape(-1)).unflatten(-2, self.at.shape)
        return values * self.present[..., None]


class GradientProbe(NamedTuple):
    """Rows of every use, None if they belong to several sequences, and a gradient for comparison."""

    rows: list[SequenceRows | None]
    gradients: list[Tensor]  # of each use, (rows, d_out)
    leaf_gradients: dict[str, Tensor]


def probe_gradients(
    problem: Problem, recorded: RecordedBatch, batch: Batch, parameters: Iterable[str]
) -> GradientProbe:
    """Run reverse passes through a recorded batch: for all its sequences, then for halves of them.

    Args:
        problem: Problem with the loss.
        recorded: Graph of the batch.
        batch: The batch on the model's device.
        parameters: Names of parameters whose gradients are returned.
    """
    z, uses = recorded.outputs, recorded.uses
    u = _term_cotangent(problem, z.detach(), batch)
    leaves = {name: recorded.leaves[name] for name in dict.fromkeys(parameters)}
    gradients_ = _backward(recorded, u, leaves.values())
    gradients, leaf_gradients = _as_rows(uses, gradients_, z), gradients_[len(uses) :]
    masks = _codes(batch.num_sequences, z.device)
    reached = [[(g != 0).any(-1) for g in gradients]]  # one sequence is asked by now
    if len(masks):
        several = (u * mask.reshape(-1, *[1] * (z.dim() - 1)) for mask in masks)
        reached = [[(g != 0).any(-1) for g in _as_rows(uses, _backward(recorded, v), z)] for v in several]
    passes = [torch.stack(passes_of_use) for passes_of_use in zip(*reached, strict=True)]
    sums = {name: g for name, g in zip(leaves, leaf_gradients, strict=True) if g is not None}
    return GradientProbe(_rows_of(uses, passes, batch.num_sequences), gradients, sums)


def _backward(recorded: RecordedBatch, u: Tensor, leaves: Iterable[Tensor] = ()) -> list[Tensor | None]:
    """Gradients of all uses, then of the leaves, for one cotangent."""
    into: list[Any] = [*(use.edge for use in recorded.uses), *leaves]
    gradients = pull([recorded.outputs], [u[None]], into, 1) if into else []
    return [None if g is None else g[0] for g in gradients]


def _as_rows(uses: list[Use], gradients: list[Tensor | None], like: Tensor) -> list[Tensor]:
    """Reshape gradients of uses to (rows, d_out)."""
    return [
        like.new_zeros(prod(use.lead), use.weight.shape[-1]) if g is None else g.flatten(0, -2)
        for use, g in zip(uses, gradients, strict=False)
    ]


def _term_cotangent(problem: Problem, z: Tensor, batch: Batch) -> Tensor:
    """Cotangent that is zero exactly at ignored terms: the loss's gradient at arbitrary outputs."""
    outputs = (torch.arange(z.numel(), dtype=z.dtype, device=z.device) * GOLDEN).remainder(1).reshape(z.shape)
    return problem.loss.gradient(outputs, batch.targets, batch.weights).detach()


def _codes(B: int, device: torch.device) -> Tensor:
    """Mask of the sequences with cotangents in each pass: (2 ⌈log₂ B⌉, B)."""
    number = torch.arange(B, device=device)
    digits = [(number >> bit) & 1 == 1 for bit in range((B - 1).bit_length())]
    return torch.stack([mask for digit in digits for mask in (digit, ~digit)]) if digits else number[:0, None]


def _rows_of(uses: list[Use], reached: list[Tensor], B: int) -> list[SequenceRows | None]:
    """Assign the rows of every use to sequences, from the passes (k, rows) that reached them.

    Uses of the same shape share this information: if all units of one layer are off for a row, another layer
    may still determine the row's sequence.
    """
    reached_by_shape: dict[tuple[int, ...], Tensor] = {}
    for use, reached_by in zip(uses, reached, strict=True):
        reached_by_shape[use.lead] = (
            reached_by_shape[use.lead] | reached_by if use.lead in reached_by_shape else reached_by
        )
    rows = {lead: _numbers(reached_by, B) for lead, reached_by in reached_by_shape.items()}
    return [rows[use.lead] for use in uses]


def _numbers(reached_by: Tensor, B: int) -> SequenceRows | None:
    """Rows by sequence from the passes (k, rows) that reached them; None if a row has several sequences."""
    counted = reached_by.any(0)
    if B == 1:
        return _by_sequence(torch.where(counted, 0, -1), B)
    digit, complement = reached_by[0::2], reached_by[1::2]
    if bool((digit & complement).any()):
        return None
    powers = 2 ** torch.arange(len(digit), device=reached_by.device)
    number = (digit * powers[:, None]).sum(0)
    return _by_sequence(torch.where(counted, number, -1), B)


def _by_sequence(number: Tensor, B: int) -> SequenceRows:
    """Sort rows by the number of their sequence; −1 means none."""
    counts = torch.bincount(number[number >= 0], minlength=B)
    R = max(int(counts.max()), 1)
    index = torch.zeros(B, R, dtype=torch.long, device=number.device)
    present = torch.arange(R, device=number.device) < counts[:, None]
    order = torch.argsort(number, stable=True)
    index[present] = order[int((number < 0).sum()) :]
    return SequenceRows(index, present)
