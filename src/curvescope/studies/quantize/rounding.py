"""Blocks on a grid: to the nearest points, and with the answer of weights that are rounded later (GPTQ).

The answer is Optimal Brain Surgeon's for a quadratic loss, of which there are two:

- `inputs`: that of the layer's outputs, E‖xᵀδ‖²/2 for every column δ, H = E[x xᵀ] over the layer's inputs x,
  one for all columns. It needs no derivative.
- `ggn`: that of the model's own loss, with the GGN of the block, written out.

Both are damped by λ = damping · mean diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.surgery.compensation import compensated
from curvescope.algorithms.surgery.grids import Grid, Steps, grid
from curvescope.algorithms.surgery.removal import damped_inverse
from curvescope.core.blocks import Block
from curvescope.core.result import Result
from curvescope.operators import GGN, KFAC
from curvescope.problem import Problem
from curvescope.studies.weight_changes import Effects, Halves, effects, weights

NEAREST, INPUTS, OWN = "nearest", "inputs", "ggn"


@dataclass(frozen=True)
class Roundings(Result):
    """One block, or all of them together, at several numbers of bits."""

    bits: np.ndarray  # (b,)
    methods: list[str]  # M
    weights: int  # n
    size: np.ndarray  # (M, b) ‖δ‖²
    trace: float  # Σ over weights of the GGN's diagonal, estimated; nan where it was not asked for
    effects: Effects  # of the M b changes, method by method

    def at(self, method: str) -> Effects:
        """Those of one method, one for every number of bits."""
        i, b = self.methods.index(method), len(self.bits)
        return self.effects.some(slice(i * b, (i + 1) * b))


def nearest(problem: Problem, block: Block, bits: int, steps: Steps) -> Tensor:
    """δ (n,) of rounding each weight to the nearest point."""
    W, own = matrix(problem, block)
    return in_order(grid(W, bits, steps).rounded(W) - W, own)


def by_inputs(
    problem: Problem, block: Block, bits: tuple[int, ...], steps: Steps, damping: float
) -> list[Tensor]:
    """δ (n,) for each number of bits, by the second moments of the layer's inputs."""
    W, own = matrix(problem, block)
    moments = KFAC(problem, block.name, kind="forward-only", bias="separate").factors(block.name)[0]
    inverse, _ = damped_inverse(moments, damping)
    return [in_order(compensated(W, inverse, grid(W, b, steps)).W - W, own) for b in bits]


def by_ggn(op: GGN, block: Block, bits: tuple[int, ...], steps: Steps, damping: float) -> list[Tensor]:
    """δ (n,) for each number of bits, by the block's GGN; weights in their order, row by row."""
    W, own = matrix(op.problem, block)
    G = op.to_dense()[own][:, own]
    inverse, _ = damped_inverse((G + G.T) / 2, damping)
    found = []
    for b in bits:
        points = grid(W, b, steps)
        flat = Grid(points.step.expand(W.shape).reshape(-1, 1), points.most)
        found.append(in_order(compensated(W.reshape(-1, 1), inverse, flat).W.view(W.shape) - W, own))
    return found


def matrix(problem: Problem, block: Block) -> tuple[Tensor, Tensor]:
    """The weights of a block, inputs × outputs, and the position of each in a vector over the block."""
    inputs_first = problem.model.inputs_first(block)
    own = problem.space(block.name).positions(inputs_first).to(problem.device)
    return weights(problem, block.name)[own].view(inputs_first.shape), own


def in_order(matrix: Tensor, own: Tensor) -> Tensor:
    """The vector over a block whose entries at the positions `own` are those of a matrix."""
    return torch.empty_like(matrix).flatten().index_copy_(0, own, matrix.flatten())


def measured(
    halves: Halves,
    blocks: str | list[str],
    changes: dict[str, list[Tensor]],
    bits: tuple[int, ...],
    trace: float = np.nan,
) -> Roundings:
    """What changes by method, one for every number of bits, do to the loss."""
    every = [delta for deltas in changes.values() for delta in deltas]
    size = torch.stack([delta.square().sum() for delta in every]).view(len(changes), len(bits))
    return Roundings(
        bits=np.array(bits),
        methods=list(changes),
        weights=len(every[0]),
        size=size.double().cpu().numpy(),
        trace=trace,
        effects=effects(halves, blocks, every),
    )
