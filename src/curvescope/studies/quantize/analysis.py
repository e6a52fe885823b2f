"""Blocks on a grid: to the nearest points, and with the answer of weights that are rounded later (GPTQ).

The answer is Optimal Brain Surgeon's for a quadratic loss, of which there are two:

- `inputs`: that of the layer's outputs, E‖xᵀδ‖²/2 for every column δ, H = E[x xᵀ] over the layer's inputs x,
  one for all columns. It needs no derivative.
- `ggn`: that of the model's own loss, with the GGN of the block, written out.

Both are damped by λ = damping · mean diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.estimates.intervals import median_interval
from curvescope.algorithms.estimates.ranks import Correlation, difference, rank_correlation
from curvescope.algorithms.surgery.grids import Grid, Steps, compensated, grid
from curvescope.algorithms.surgery.removal import damped_inverse
from curvescope.core.blocks import Block
from curvescope.core.result import Result
from curvescope.operators import GGN, KFAC
from curvescope.problem import Problem
from curvescope.studies.common.weight_changes import Effects, Halves, effects, weights

if TYPE_CHECKING:
    from curvescope.studies.quantize.study import Quantized

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


# ----------------------------------------------------------------------------------------------- correlations

PREDICTORS = {
    "error": "‖δ‖²",
    "trace": "tr(GGN) ‖δ‖² / 2n",
    "second order": "½ δᵀHδ",
    "both orders": "gᵀδ + ½ δᵀHδ",
}


class Row(NamedTuple):
    """One rank correlation, over blocks that are rounded to the nearest points."""

    bits: int
    predictor: str
    correlation: Correlation


def predicted(result: Quantized, predictor: str, bit: int, method: str = NEAREST) -> np.ndarray:
    """What a predictor says of every block, at the number of bits at this place: (B,)."""
    found = []
    for one in result.blocks.values():
        effects, size = one.at(method), one.size[one.methods.index(method), bit]
        said = {
            "error": size,
            "trace": one.trace / one.weights * size / 2,
            "second order": effects.second[bit].mean(),
            "both orders": effects.predicted[bit].mean(),
        }
        found.append(said[predictor])
    return np.array(found)


def increases(result: Quantized, bit: int, method: str = NEAREST) -> np.ndarray:
    """The measured increase of the loss by every block: (B,)."""
    return np.array([one.at(method).measured[bit].mean() for one in result.blocks.values()])


def rows(result: Quantized) -> Iterator[Row]:
    """All of them."""
    for i, bits in enumerate(result.together.bits):
        truth = increases(result, i)
        for predictor in PREDICTORS:
            said = predicted(result, predictor, i)
            found = rank_correlation(said, truth, draws=result.draws, seed=result.seed)
            yield Row(int(bits), predictor, found)


def better(result: Quantized, one: str, other: str, bit: int) -> Correlation:
    """ρ of one predictor less that of another."""
    a, b = (predicted(result, name, bit) for name in (one, other))
    return difference(a, b, increases(result, bit), draws=result.draws, seed=result.seed)


def relative_error(result: Quantized, bit: int) -> Correlation:
    """Median over blocks of |predicted − measured| / |measured|, with its interval by order statistics.

    Blocks without any change, 0 by 0, are left out: `count` is that of the others.
    """
    truth, said = increases(result, bit), predicted(result, "both orders", bit)
    moved = (truth != 0) | (said != 0)
    with np.errstate(divide="ignore"):
        each = np.abs(said - truth)[moved] / np.abs(truth)[moved]
    middle = float(np.median(each)) if len(each) else np.nan
    return Correlation(middle, *median_interval(each), len(each), len(each))
