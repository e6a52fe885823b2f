"""The study `quantize`: what rounding of weights to few bits does to the loss, as predicted and as measured.

Every block alone, and all of them together: rounded to the nearest points of a grid, and with the answer of
the weights that are rounded later (GPTQ, which is Optimal Brain Surgeon for rounding). The prediction is
gᵀδ + ½ δᵀHδ with the Hessian. Curvature is measured on the first sequences; losses on them, and on others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch

from curvescope.algorithms.estimates.diagonal import diagonal
from curvescope.algorithms.surgery.grids import Steps
from curvescope.core.blocks import Block
from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.operators import GGN
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.common.weight_changes import HELD_OUT, Halves, head_block, make_halves
from curvescope.studies.quantize.analysis import (
    INPUTS,
    NEAREST,
    OWN,
    Roundings,
    by_ggn,
    by_inputs,
    measured,
    nearest,
)
from curvescope.studies.setting import ModelOnData, notes_of

if TYPE_CHECKING:
    pass

ALL = "all"
HEAD = 0  # of the last layer, where no small block is asked for
NUM_ROOTS = 16  # random squares, for traces of the GGN


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to round. The defaults take two minutes on a CPU."""

    tokens: int = setting(1280, "of a text, in all; labeled texts and images: ⌈tokens / seq_len⌉ of them")
    seq_len: int = setting(32, "tokens of one sequence")
    held_out: float = setting(0.75, HELD_OUT)
    dtype: str = setting("float64", "float32 or float64; eight bits move the loss by little")
    blocks: tuple[str, ...] = setting(("L*.W_*",), "globs: the weight matrices that are rounded")
    bits: tuple[int, ...] = setting((8, 4, 3), "of a weight, from 2 on")
    steps: str = setting("column", "of the grid: one for every output, `column`, or for all, `tensor`")
    damping: float = setting(0.1, "λ of (H + λ I)⁻¹, as a share of the mean diagonal")
    exact_blocks: tuple[str, ...] = setting(
        (), "globs: rounded by their own GGN, too; by default a small one, a head's W_O in the last layer"
    )
    max_dense: int = setting(3000, "weights of a block whose GGN is written out")
    draws: int = setting(1000, "of the bootstrap")

    def __post_init__(self) -> None:
        as_tuples(self, "blocks", "bits", "exact_blocks")
        super().__post_init__()
        at_least(self, 50, "draws")
        if not self.bits or any(isinstance(b, bool) or b < 2 for b in self.bits):
            raise UsageError(f"expected bits of at least 2, got {self.bits}")
        if self.steps not in get_args(Steps):
            raise UsageError(f"expected steps to be one of {', '.join(get_args(Steps))}, got {self.steps!r}")
        if not self.damping > 0:
            raise UsageError(f"expected a damping above 0, got {self.damping}")


@dataclass(frozen=True)
class Quantized(Shown):
    """Roundings of every block, of all of them, and of some by their own GGN."""

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
    """Round and measure.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    halves = make_halves(cfg, cfg.held_out)
    problem = halves.problem
    blocks = _matrices(halves, cfg.blocks)
    exact = _exact_blocks(cfg, halves)
    work = _Work(cfg, halves)
    pieces = [Piece(f"block.{b.name}", work.alone(b), f"rounding of {b.name}", kind="blocks") for b in blocks]
    pieces.append(Piece(ALL, work.together(blocks), "rounding of all blocks"))
    pieces += [Piece(f"exact.{b.name}", work.exact(b), f"rounding of {b.name} by its GGN") for b in exact]
    contents = fingerprint(problem.model, problem.batches, halves.held_out.batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    return Quantized(
        model=problem.model.name,
        data=problem.batches.name,
        loss=problem.loss_value(),
        held_out_loss=halves.held_out.loss_value(),
        steps=cfg.steps,
        damping=cfg.damping,
        blocks={b.name: found.take(Roundings, f"block.{b.name}") for b in blocks},
        together=found.take(Roundings, ALL),
        exact={b.name: found.take(Roundings, f"exact.{b.name}") for b in exact},
        draws=cfg.draws,
        seed=cfg.seed,
        notes=notes_of(cfg, problem),
    )


def _matrices(halves: Halves, globs: tuple[str, ...]) -> list[Block]:
    """Blocks that are matrices."""
    found = [block for block in halves.problem.space(*globs) if len(block.shape) == 2]
    if not found:
        raise UsageError(f"expected blocks that are matrices, {', '.join(globs)} has none")
    return found


def _exact_blocks(cfg: Config, halves: Halves) -> list[Block]:
    """Those asked for, which must be small; else one, if it is."""
    asked = cfg.exact_blocks or (head_block(halves.problem.model, HEAD),)
    found = _matrices(halves, asked)
    large = [block for block in found if block.size > cfg.max_dense]
    if large and cfg.exact_blocks:
        raise UsageError(
            f"expected exact_blocks of at most {cfg.max_dense} weights, {large[0].name} has {large[0].size}",
            hint="a head of it, or a larger max_dense; max_dense=0 without exact_blocks leaves them out",
        )
    return [block for block in found if block not in large]


class _Work:
    """What the pieces do."""

    def __init__(self, cfg: Config, halves: Halves):
        self.cfg, self.halves, self.problem = cfg, halves, halves.problem
        self.steps: Any = cfg.steps

    def changes(self, block: Block) -> dict[str, list[torch.Tensor]]:
        """By method, one for every number of bits."""
        cfg = self.cfg
        return {
            NEAREST: [nearest(self.problem, block, b, self.steps) for b in cfg.bits],
            INPUTS: by_inputs(self.problem, block, cfg.bits, self.steps, cfg.damping),
        }

    def ggn(self, block: Block) -> GGN:
        """Of a block."""
        how: dict[str, Any] = {"engine": self.cfg.engine, "checkpoint": self.cfg.checkpoint}
        return GGN(self.problem, block.name, **how)

    def alone(self, block: Block) -> Callable[[], Roundings]:
        """One block, the others as they are."""

        def work() -> Roundings:
            squares = diagonal(self.ggn(block), num_probes=NUM_ROOTS, method="roots", seed=self.cfg.seed)
            trace = float(squares.values.double().sum())
            return measured(self.halves, block.name, self.changes(block), self.cfg.bits, trace)

        return work

    def together(self, blocks: list[Block]) -> Callable[[], Roundings]:
        """All blocks at once, each rounded as it is alone."""

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
        """One block by its own GGN, beside the other ways."""

        def work() -> Roundings:
            own = by_ggn(self.ggn(block), block, self.cfg.bits, self.steps, self.cfg.damping)
            return measured(self.halves, block.name, {**self.changes(block), OWN: own}, self.cfg.bits)

        return work
