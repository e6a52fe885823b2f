"""Blocks as linear layers: where a block of the model lies in the linear maps that were recorded.

A block is m × n, inputs × outputs. A use of it contributes Σ_rows a gᵀ to its gradient, or Σ_rows g aᵀ where
it is used transposed, as a tied embedding in the unembedding; a use may hold more than the block (a packed
matrix) or a part of it. A bias is the row for the input 1: of one layer with its weights, (m + 1) × n, or of
its own.

Which rows of a linear map belong to which sequence, found by asking for gradients of some sequences.

A row of y = a W belongs to sequence n if the loss of n depends on it. Which axis of y counts sequences is not
guessed: cotangents of the outputs are switched on for half of the sequences at a time, so that the passes at
which gradients arrive spell the number of a row's sequence in binary digits, and their complements. A row at
which none arrives, such as padding, does not count.
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
from curvescope.operators.kronecker.record import Recorded, Use, View
from curvescope.problem import Problem

NEAR = {torch.float32: 1e-4, torch.float64: 1e-10}  # relative: two orders of the same operations
EXPERTS = re.compile(r"\.expert\d+\.")  # in names of blocks
EXPERT = "an expert sees the tokens that are sent to it, and no factors are made for such a use"
UNUSED = "no sequence uses it"
OTHERWISE = "it does something else than being the matrix, or the bias, of a linear map"
Side = tuple[Tensor, Tensor]
"""Which inputs (or outputs) of a use, and where they are among the rows or columns of a block."""


class Overlap(NamedTuple):
    """What a use holds of a block; rows of the block are outputs if `transposed`. A bias has no inputs."""

    transposed: bool
    inputs: Side | None
    outputs: Side


class Place(NamedTuple):
    """A use of a block."""

    use: int
    transposed: bool
    inputs: Side | None
    outputs: Side


@dataclass(frozen=True)
class Layer:
    """What gets a pair of factors: weights, a bias, or both; m × n as a matrix."""

    weight: Block | None
    bias: Block | None

    @property
    def name(self) -> str:
        """Of the weights, or of a bias by itself."""
        return self.blocks[0].name

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Weights, then bias, as far as they are there."""
        return tuple(block for block in (self.weight, self.bias) if block is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """m, with one for a bias, and n."""
        m, n = (0, self.blocks[0].shape[-1]) if self.weight is None else self.weight.shape
        return m + (self.bias is not None), n


@dataclass(frozen=True)
class Found:
    """Layers of a selection of blocks, and why other blocks have no factors."""

    layers: tuple[Layer, ...]
    left_out: dict[str, str] = field(default_factory=dict)


def find_layers(
    blocks: Sequence[Block],
    shapes: dict[str, tuple[int, ...]],
    recorded: Recorded,
    asked: Asked,
    *,
    joint: bool,
) -> Found:
    """The blocks that are linear maps in a recorded batch, biases with their weights if `joint`."""
    places, left_out = {}, {}
    for block in blocks:
        found = block_places(block, shapes[block.parameter], recorded.uses)
        if EXPERTS.search(block.name):
            left_out[block.name] = EXPERT
        elif found == [] and not _moves(block, asked):
            left_out[block.name] = UNUSED
        elif found is None or not _adds_up(block, found, recorded, asked):
            left_out[block.name] = OTHERWISE
        else:
            places[block] = found
    weights = {block: at for block, at in places.items() if at and at[0].inputs is not None}
    biases = {block: at for block, at in places.items() if block not in weights}
    layers, paired = {}, set()
    for block, at in weights.items():
        partner = next((b for b, own in biases.items() if joint and _belong(at, own)), None)
        layers[block] = Layer(block, partner)
        paired.add(partner)
    layers |= {block: Layer(None, block) for block in biases if block not in paired}
    return Found(tuple(layers[block] for block in places if block in layers), left_out)


def merged(blocks: Sequence[Block], one: Found, other: Found) -> Found:
    """What is known of blocks from two parts of the data: a layer in one of them is one, if it is in both."""
    by_block = {block: layer for layer in one.layers for block in layer.blocks}
    for layer in other.layers:
        for block in layer.blocks:
            if by_block.setdefault(block, layer) != layer:
                raise used_in_two_ways(block.name)
    why = {**one.left_out, **{name: why for name, why in other.left_out.items() if why != UNUSED}}
    kept = {block.name for block in by_block}
    if wrong := [name for name in kept if why.get(name, UNUSED) != UNUSED]:
        raise used_in_two_ways(wrong[0])
    layers = dict.fromkeys(by_block[block] for block in blocks if block in by_block)
    return Found(tuple(layers), {name: reason for name, reason in why.items() if name not in kept})


def used_in_two_ways(name: str) -> CurvescopeError:
    """What is said of a block that is a linear map of some kind in a part of the data only."""
    return CurvescopeError(
        f"{name} is used in one way in some sequences and in another in others",
        hint="leave it out, or bias='separate' where that is a bias that is added now and then",
    )


def block_places(block: Block, shape: tuple[int, ...], uses: Sequence[Use]) -> list[Place] | None:
    """Where a block is used; None where a use cuts it into something else than rows and columns."""
    found: list[Place] = []
    for i, use in enumerate(uses):
        for view in (use.weight, use.bias):
            if view is None or view.parameter != block.parameter or len(view.shape) != len(block.shape):
                continue
            try:
                at = _overlap(block, view, shape)
            except ValueError:
                return None
            if at is not None:
                found.append(Place(i, *at))
    return found


@lru_cache(maxsize=4096)
def _overlap(block: Block, view: View, shape: tuple[int, ...]) -> Overlap | None:
    """How the entries of a block lie in those of a view of its parameter; None where none does.

    Raises:
        ValueError: They are not some rows of it crossed with some columns.
    """
    inside = torch.full((prod(shape),), -1)
    inside[view.positions().reshape(-1)] = torch.arange(prod(view.shape))
    at = inside[block.positions(shape)].reshape(block.shape)
    if bool((at < 0).all()):
        return None
    if at.dim() == 1:
        there = (at >= 0).nonzero()[:, 0]
        return Overlap(False, None, (at[there], there))
    rows, columns = (at >= 0).any(1).nonzero()[:, 0], (at >= 0).any(0).nonzero()[:, 0]
    cut, width = at[rows][:, columns], view.shape[1]
    i, j = cut[:, 0], cut[0]
    if torch.equal(cut, (i // width * width)[:, None] + j % width):
        return Overlap(False, (i // width, rows), (j % width, columns))
    if torch.equal(cut, (i % width)[:, None] + j // width * width):
        return Overlap(True, (j // width, columns), (i % width, rows))
    raise ValueError


def _belong(weight: list[Place], bias: list[Place]) -> bool:
    """Whether a bias is added behind these weights, every time, and nowhere else."""
    return len(weight) == len(bias) and all(
        w.use == b.use
        and not w.transposed
        and all(torch.equal(x, y) for x, y in zip(w.outputs, b.outputs, strict=True))
        for w, b in zip(weight, bias, strict=True)
    )


def _moves(block: Block, asked: Asked) -> bool:
    """Whether a gradient arrives at the block."""
    leaf = asked.leaf_gradients.get(block.parameter)
    return leaf is not None and bool(block.take(leaf).any())


def _adds_up(block: Block, places: list[Place], recorded: Recorded, asked: Asked) -> bool:
    """Whether the uses that were recorded make the whole of a gradient in the block.

    Compared with the sum of absolute values, since gradients of some biases, as of keys, are zero.
    """
    leaf = asked.leaf_gradients.get(block.parameter)
    like = recorded.outputs
    total, scale = torch.zeros(2, *block.shape, dtype=like.dtype, device=like.device)
    for place in places:
        use, g = recorded.uses[place.use], asked.gradients[place.use]
        G = put(g, place.outputs, block.shape[0 if place.transposed else -1])
        if place.inputs is None:
            total, scale = total + G.sum(0), scale + G.abs().sum(0)
            continue
        a = put(use.inputs(g.dtype), place.inputs, block.shape[1 if place.transposed else 0])
        parts = [x.T @ y if place.transposed else y.T @ x for x, y in ((G, a), (G.abs(), a.abs()))]
        total, scale = total + parts[0], scale + parts[1]
    true = torch.zeros_like(total) if leaf is None else block.take(leaf)
    near = NEAR.get(total.dtype, 0.05)
    return bool(places) and float((total - true).norm()) <= near * float(scale.norm())


def put(x: Tensor, at: Side, size: int) -> Tensor:
    """Entries of the last axis in their places among `size`, zero elsewhere."""
    which, where = (index.to(x.device) for index in at)
    if len(where) == size:  # places of a whole side are in order
        return x.index_select(-1, which)
    found = x.new_zeros(*x.shape[:-1], size)
    found[..., where] = x.index_select(-1, which)
    return found


def side_inputs(
    layer: Layer, places: list[Place], uses: Sequence[Use], rows: list[Rows], dtype: torch.dtype
) -> dict[bool, Tensor]:
    """Inputs of a layer by sequence, one tensor (B, R, side) for each orientation that is used."""
    found: dict[bool, list[Tensor]] = {}
    for place in places:
        take = rows[place.use]
        if place.inputs is None:
            a = take.there[..., None].to(dtype)
        else:
            assert layer.weight is not None, "inputs belong to weights"
            size = layer.weight.shape[1 if place.transposed else 0]
            a = take.take(put(uses[place.use].inputs(dtype), place.inputs, size))
            if layer.bias is not None:
                a = torch.cat([a, take.there[..., None].to(dtype)], dim=-1)
        found.setdefault(place.transposed, []).append(a)
    return {key: torch.cat(parts, dim=1) for key, parts in found.items()}


def side_outputs(layer: Layer, places: list[Place], gradients: Sequence[Tensor]) -> dict[bool, Tensor]:
    """Gradients of a layer's outputs (k, B, R, side), in the order of `side_inputs`."""
    found: dict[bool, list[Tensor]] = {}
    for place in places:
        size = layer.blocks[0].shape[0 if place.transposed else -1]
        found.setdefault(place.transposed, []).append(put(gradients[place.use], place.outputs, size))
    return {key: torch.cat(parts, dim=2) for key, parts in found.items()}


GOLDEN = 0.6180339887498949  # its multiples do not repeat, modulo 1


class Rows(NamedTuple):
    """Rows of a use by sequence, (B, R): positions, and where there is one; some sequences have fewer."""

    at: Tensor
    there: Tensor

    def take(self, x: Tensor) -> Tensor:
        """(…, rows, d) to (…, B, R, d), zero where a sequence has no row."""
        if not x.shape[-2]:  # an expert that no token came to
            return x.new_zeros(*x.shape[:-2], *self.at.shape, x.shape[-1])
        found = x.index_select(-2, self.at.reshape(-1)).unflatten(-2, self.at.shape)
        return found * self.there[..., None]


class Asked(NamedTuple):
    """Rows of every use, None where they serve several sequences; and a gradient to check against."""

    rows: list[Rows | None]
    gradients: list[Tensor]  # of each use, (rows, d_out)
    leaf_gradients: dict[str, Tensor]


def ask(problem: Problem, recorded: Recorded, batch: Batch, parameters: Iterable[str]) -> Asked:
    """Send cotangents back through a recorded batch: of all its sequences, then of some after the others.

    Args:
        problem: Whose loss it is.
        recorded: The batch's graph.
        batch: A placed one.
        parameters: Those whose gradients are wanted.
    """
    z, uses = recorded.outputs, recorded.uses
    u = _anything(problem, z.detach(), batch)
    leaves = {name: recorded.leaves[name] for name in dict.fromkeys(parameters)}
    found = _back(recorded, u, leaves.values())
    gradients, whole = _rows_first(uses, found, z), found[len(uses) :]
    masks = _codes(batch.num_sequences, z.device)
    reached = [[(g != 0).any(-1) for g in gradients]]  # one sequence is asked by now
    if len(masks):
        several = (u * mask.reshape(-1, *[1] * (z.dim() - 1)) for mask in masks)
        reached = [[(g != 0).any(-1) for g in _rows_first(uses, _back(recorded, v), z)] for v in several]
    passes = [torch.stack(own) for own in zip(*reached, strict=True)]
    sums = {name: g for name, g in zip(leaves, whole, strict=True) if g is not None}
    return Asked(_rows_of(uses, passes, batch.num_sequences), gradients, sums)


def _back(recorded: Recorded, u: Tensor, leaves: Iterable[Tensor] = ()) -> list[Tensor | None]:
    """Gradients for one cotangent, of all uses, then of the leaves."""
    into: list[Any] = [*(use.edge for use in recorded.uses), *leaves]
    found = pull([recorded.outputs], [u[None]], into, 1) if into else []
    return [None if g is None else g[0] for g in found]


def _rows_first(uses: list[Use], found: list[Tensor | None], like: Tensor) -> list[Tensor]:
    """Gradients of uses as (rows, d_out)."""
    return [
        like.new_zeros(prod(use.lead), use.weight.shape[-1]) if g is None else g.flatten(0, -2)
        for use, g in zip(uses, found, strict=False)
    ]


def _anything(problem: Problem, z: Tensor, batch: Batch) -> Tensor:
    """A cotangent that is zero exactly where no term counts: the loss's gradient at outputs of no meaning."""
    outputs = (torch.arange(z.numel(), dtype=z.dtype, device=z.device) * GOLDEN).remainder(1).reshape(z.shape)
    return problem.loss.gradient(outputs, batch.targets, batch.weights).detach()


def _codes(B: int, device: torch.device) -> Tensor:
    """Which sequences are switched on in which pass: (2 ⌈log₂ B⌉, B)."""
    number = torch.arange(B, device=device)
    digits = [(number >> bit) & 1 == 1 for bit in range((B - 1).bit_length())]
    return torch.stack([mask for digit in digits for mask in (digit, ~digit)]) if digits else number[:0, None]


def _rows_of(uses: list[Use], reached: list[Tensor], B: int) -> list[Rows | None]:
    """Rows of every use, from the passes (k, rows) that reached them.

    Uses of one shape share what is known of a row: where a layer's units are all switched off, another tells.
    """
    together: dict[tuple[int, ...], Tensor] = {}
    for use, here in zip(uses, reached, strict=True):
        together[use.lead] = together[use.lead] | here if use.lead in together else here
    rows = {lead: _numbers(here, B) for lead, here in together.items()}
    return [rows[use.lead] for use in uses]


def _numbers(here: Tensor, B: int) -> Rows | None:
    """Rows by sequence from the passes (k, rows) that reached them; None where a row serves several."""
    counted = here.any(0)
    if B == 1:
        return _by_sequence(torch.where(counted, 0, -1), B)
    digit, other = here[0::2], here[1::2]
    if bool((digit & other).any()):
        return None
    place = 2 ** torch.arange(len(digit), device=here.device)
    number = (digit * place[:, None]).sum(0)
    return _by_sequence(torch.where(counted, number, -1), B)


def _by_sequence(number: Tensor, B: int) -> Rows:
    """Rows sorted by the number of their sequence, −1 for none."""
    counts = torch.bincount(number[number >= 0], minlength=B)
    R = max(int(counts.max()), 1)
    index = torch.zeros(B, R, dtype=torch.long, device=number.device)
    there = torch.arange(R, device=number.device) < counts[:, None]
    order = torch.argsort(number, stable=True)
    index[there] = order[int((number < 0).sum()) :]
    return Rows(index, there)
