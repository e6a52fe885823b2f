"""Study `quantize`: the effect of rounding weights to few bits on the loss, predicted by curvature and
measured.

It rounds every block alone and all blocks together: to the nearest points of a grid, and with GPTQ, which
adjusts the weights that are rounded later (Optimal Brain Surgeon for rounding). The prediction is gᵀδ + ½
δᵀHδ with the Hessian. Curvature is measured on the first sequences, losses on these and on held-out ones.

The adjustment minimizes a quadratic loss, of which there are two:

- `inputs`: the error of the layer's outputs, E‖xᵀδ‖²/2 for every column δ. H = E[x xᵀ] over the layer's
  inputs x is the same for all columns and needs no derivative.
- `ggn`: the model's own loss, with the block's GGN written out.

Both are damped by λ = damping · mean diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from curvescope.algorithms.estimates.diagonal import diagonal
from curvescope.algorithms.estimates.intervals import median_interval
from curvescope.algorithms.estimates.ranks import Correlation, difference, rank_correlation
from curvescope.algorithms.surgery.grids import Grid, Steps, compensated, grid
from curvescope.algorithms.surgery.removal import damped_inverse
from curvescope.core.blocks import Block
from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.core.result import Result
from curvescope.operators import GGN, KFAC
from curvescope.problem import Problem
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import Piece, State, work_through
from curvescope.runs.study_result import Shown
from curvescope.studies.common.weight_changes import (
    HELD_OUT,
    Effects,
    Halves,
    effects,
    head_block,
    make_halves,
    weights,
)
from curvescope.studies.problem_config import ModelOnData, notes_of

NEAREST, INPUTS, OWN = "nearest", "inputs", "ggn"


@dataclass(frozen=True)
class Roundings(Result):
    """Roundings of one block, or of all blocks together, to several numbers of bits."""

    bits: np.ndarray  # (b,)
    methods: list[str]  # M
    weights: int  # n
    size: np.ndarray  # (M, b) ‖δ‖²
    trace: float  # Σ over weights of the GGN's diagonal, estimated; nan if not computed
    effects: Effects  # of the M b changes, method by method

    def at(self, method: str) -> Effects:
        """Effects of one method, one for every number of bits."""
        i, b = self.methods.index(method), len(self.bits)
        return self.effects.some(slice(i * b, (i + 1) * b))


def nearest(problem: Problem, block: Block, bits: int, steps: Steps) -> Tensor:
    """Return the change δ (n,) that rounds each weight to the nearest point."""
    W, own = matrix(problem, block)
    return in_order(grid(W, bits, steps).rounded(W) - W, own)


def by_inputs(
    problem: Problem, block: Block, bits: tuple[int, ...], steps: Steps, damping: float
) -> list[Tensor]:
    """Return the change δ (n,) for each number of bits, from the second moments of the layer's inputs."""
    W, own = matrix(problem, block)
    moments = KFAC(problem, block.name, kind="forward-only", bias="separate").factors(block.name)[0]
    inverse, _ = damped_inverse(moments, damping)
    return [in_order(compensated(W, inverse, grid(W, b, steps)).W - W, own) for b in bits]


def by_ggn(op: GGN, block: Block, bits: tuple[int, ...], steps: Steps, damping: float) -> list[Tensor]:
    """Return the change δ (n,) for each number of bits, from the block's GGN; weights go row by row."""
    W, own = matrix(op.problem, block)
    G = op.to_dense()[own][:, own]
    inverse, _ = damped_inverse((G + G.T) / 2, damping)
    changes = []
    for b in bits:
        points = grid(W, b, steps)
        flat = Grid(points.step.expand(W.shape).reshape(-1, 1), points.most)
        changes.append(in_order(compensated(W.reshape(-1, 1), inverse, flat).W.view(W.shape) - W, own))
    return changes


def matrix(problem: Problem, block: Block) -> tuple[Tensor, Tensor]:
    """Return the weights of a block as inputs × outputs, and the position of each in a vector."""
    inputs_first = problem.model.inputs_first(block)
    own = problem.space(block.name).positions(inputs_first).to(problem.device)
    return weights(problem, block.name)[own].view(inputs_first.shape), own


def in_order(matrix: Tensor, own: Tensor) -> Tensor:
    """Return the vector over a block with the entries of a matrix at the positions `own`."""
    return torch.empty_like(matrix).flatten().index_copy_(0, own, matrix.flatten())


def measured(
    halves: Halves,
    blocks: str | list[str],
    changes: dict[str, list[Tensor]],
    bits: tuple[int, ...],
    trace: float = np.nan,
) -> Roundings:
    """Measure the effect of changes on the loss, by method and number of bits."""
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


class RoundingRank(NamedTuple):
    """One rank correlation over blocks that are rounded to the nearest points."""

    bits: int
    predictor: str
    correlation: Correlation


def predicted(result: Quantized, predictor: str, bit: int, method: str = NEAREST) -> np.ndarray:
    """Return what a predictor says about every block; `bit` is an index into the numbers of bits: (B,)."""
    predictions = []
    for block in result.blocks.values():
        effects, size = block.at(method), block.size[block.methods.index(method), bit]
        values = {
            "error": size,
            "trace": block.trace / block.weights * size / 2,
            "second order": effects.second[bit].mean(),
            "both orders": effects.predicted[bit].mean(),
        }
        predictions.append(values[predictor])
    return np.array(predictions)


def increases(result: Quantized, bit: int, method: str = NEAREST) -> np.ndarray:
    """Measured increase of the loss for every block: (B,)."""
    return np.array([block.at(method).measured[bit].mean() for block in result.blocks.values()])


def rows(result: Quantized) -> Iterator[RoundingRank]:
    """Yield every rank correlation."""
    for i, bits in enumerate(result.together.bits):
        truth = increases(result, i)
        for predictor in PREDICTORS:
            said = predicted(result, predictor, i)
            found = rank_correlation(said, truth, draws=result.draws, seed=result.seed)
            yield RoundingRank(int(bits), predictor, found)


def better(result: Quantized, one: str, other: str, bit: int) -> Correlation:
    """ρ of one predictor minus ρ of another."""
    a, b = (predicted(result, name, bit) for name in (one, other))
    return difference(a, b, increases(result, bit), draws=result.draws, seed=result.seed)


def relative_error(result: Quantized, bit: int) -> Correlation:
    """Median over blocks of |predicted − measured| / |measured|, with an order-statistics interval.

    Blocks that rounding does not change (0 by 0) are left out; `count` is the number of the others.
    """
    truth, said = increases(result, bit), predicted(result, "both orders", bit)
    moved = (truth != 0) | (said != 0)
    with np.errstate(divide="ignore"):
        each = np.abs(said - truth)[moved] / np.abs(truth)[moved]
    middle = float(np.median(each)) if len(each) else np.nan
    return Correlation(middle, *median_interval(each), len(each), len(each))


ALL = "all"
HEAD = 0  # the head of the last layer that is rounded by its GGN by default
NUM_ROOTS = 16  # random vectors for traces of the GGN


@dataclass(frozen=True)
class Config(ModelOnData):
    """Settings of the study. The defaults take two minutes on a CPU."""

    tokens: int = setting(
        1280, "tokens read from a text in total; for labeled texts and images: ⌈tokens / seq_len⌉ examples"
    )
    seq_len: int = setting(32, "tokens of one sequence")
    held_out: float = setting(0.75, HELD_OUT)
    dtype: str = setting(
        "float64", "float32 or float64; rounding to eight bits changes the loss only a little"
    )
    blocks: tuple[str, ...] = setting(("L*.W_*",), "glob patterns of the weight matrices to round")
    bits: tuple[int, ...] = setting((8, 4, 3), "bits per weight, at least 2")
    steps: str = setting(
        "column", "steps of the grid: `column`, one for every output, or `tensor`, one for all"
    )
    damping: float = setting(0.1, "λ of (H + λ I)⁻¹, relative to the mean diagonal")
    exact_blocks: tuple[str, ...] = setting(
        (),
        "glob patterns of blocks that are also rounded with their own GGN; by default a head's W_O in "
        "the last layer",
    )
    max_dense: int = setting(3000, "largest block whose GGN is written out")
    draws: int = setting(1000, "bootstrap samples", least=50)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bits or any(isinstance(b, bool) or b < 2 for b in self.bits):
            raise UsageError(f"expected bits of at least 2, got {self.bits}")
        if self.steps not in get_args(Steps):
            raise UsageError(f"expected steps to be one of {', '.join(get_args(Steps))}, got {self.steps!r}")
        if not self.damping > 0:
            raise UsageError(f"expected a damping above 0, got {self.damping}")


@dataclass(frozen=True)
class Quantized(Shown):
    """Roundings of every block, of all blocks together, and of some blocks with their own GGN."""

    model: str
    data: str
    loss: float
    held_out_loss: float
    steps: str
    damping: float
    blocks: dict[str, Roundings]
    together: Roundings
    exact: dict[str, Roundings]
    draws: int
    seed: int


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Quantized:
    """Round weights, and measure the loss."""
    halves = make_halves(cfg, cfg.held_out)
    problem = halves.problem
    blocks = _matrices(halves, cfg.blocks)
    exact = _exact_blocks(cfg, halves)
    work = _Work(cfg, halves)
    pieces = [Piece(f"block.{b.name}", work.alone(b), f"rounding of {b.name}", kind="blocks") for b in blocks]
    pieces.append(Piece(ALL, work.together(blocks), "rounding of all blocks"))
    pieces += [Piece(f"exact.{b.name}", work.exact(b), f"rounding of {b.name} by its GGN") for b in exact]
    contents = fingerprint(problem.model, problem.batches, halves.held_out.batches)
    results = work_through(pieces, contents=contents, progress=progress, state=state)
    return Quantized(
        model=problem.model.name,
        data=problem.batches.name,
        loss=problem.loss_value(),
        held_out_loss=halves.held_out.loss_value(),
        steps=cfg.steps,
        damping=cfg.damping,
        blocks={b.name: results.take(Roundings, f"block.{b.name}") for b in blocks},
        together=results.take(Roundings, ALL),
        exact={b.name: results.take(Roundings, f"exact.{b.name}") for b in exact},
        draws=cfg.draws,
        seed=cfg.seed,
        notes=notes_of(cfg, problem),
    )


def _matrices(halves: Halves, globs: tuple[str, ...]) -> list[Block]:
    """Return the selected blocks that are matrices."""
    matrices = [block for block in halves.problem.space(*globs) if len(block.shape) == 2]
    if not matrices:
        raise UsageError(f"expected blocks that are matrices, but {', '.join(globs)} matches none")
    return matrices


def _exact_blocks(cfg: Config, halves: Halves) -> list[Block]:
    """Return the blocks in the settings, which must be small; by default one head, if it is small."""
    asked = cfg.exact_blocks or (head_block(halves.problem.model, HEAD),)
    found = _matrices(halves, asked)
    large = [block for block in found if block.size > cfg.max_dense]
    if large and cfg.exact_blocks:
        raise UsageError(
            f"expected exact_blocks with at most {cfg.max_dense} weights, but {large[0].name} has "
            f"{large[0].size}",
            hint="choose one head of it, or a larger max_dense; max_dense=0 without exact_blocks skips them",
        )
    return [block for block in found if block not in large]


class _Work:
    """Work of the pieces."""

    def __init__(self, cfg: Config, halves: Halves):
        self.cfg, self.halves, self.problem = cfg, halves, halves.problem
        self.steps: Any = cfg.steps

    def changes(self, block: Block) -> dict[str, list[torch.Tensor]]:
        """Return the changes of a block by method, one for every number of bits."""
        cfg = self.cfg
        return {
            NEAREST: [nearest(self.problem, block, b, self.steps) for b in cfg.bits],
            INPUTS: by_inputs(self.problem, block, cfg.bits, self.steps, cfg.damping),
        }

    def ggn(self, block: Block) -> GGN:
        """GGN of a block."""
        how: dict[str, Any] = {"engine": self.cfg.engine, "checkpoint": self.cfg.checkpoint}
        return GGN(self.problem, block.name, **how)

    def alone(self, block: Block) -> Callable[[], Roundings]:
        """Return the work for one rounded block; the others stay unchanged."""

        def work() -> Roundings:
            squares = diagonal(self.ggn(block), num_probes=NUM_ROOTS, method="roots", seed=self.cfg.seed)
            trace = float(squares.values.double().sum())
            return measured(self.halves, block.name, self.changes(block), self.cfg.bits, trace)

        return work

    def together(self, blocks: list[Block]) -> Callable[[], Roundings]:
        """Return the work for all blocks, each rounded as it is alone."""

        def work() -> Roundings:
            names = [block.name for block in blocks]
            own = {block.name: self.changes(block) for block in blocks}
            space = self.problem.space(names)
            joined = {
                method: [
                    space.from_dict({n: own[n][method][i] for n in names}) for i in range(len(self.cfg.bits))
                ]
                for method in (NEAREST, INPUTS)
            }
            return measured(self.halves, names, joined, self.cfg.bits)

        return work

    def exact(self, block: Block) -> Callable[[], Roundings]:
        """Return the work for one block rounded with its own GGN and by the other methods."""

        def work() -> Roundings:
            own = by_ggn(self.ggn(block), block, self.cfg.bits, self.steps, self.cfg.damping)
            return measured(self.halves, block.name, {**self.changes(block), OWN: own}, self.cfg.bits)

        return work
