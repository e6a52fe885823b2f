"""Blocks as linear layers: where a block of the model lies in the linear maps that were recorded.

A block is m × n, inputs × outputs. A use of it contributes Σ_rows a gᵀ to its gradient, or Σ_rows g aᵀ where
it is used transposed, as a tied embedding in the unembedding; a use may hold more than the block (a packed
matrix) or a part of it. A bias is the row for the input 1: of one layer with its weights, (m + 1) × n, or of
its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from curvescope.core.blocks import Block
from curvescope.core.errors import CurvescopeError
from curvescope.operators.kronecker.record import Recorded, Use, View
from curvescope.operators.kronecker.sequences import Asked, Rows

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
