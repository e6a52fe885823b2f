"""The study `prune`: what the removal of weights does to the loss, as predicted and as measured.

Of every block: single weights and random groups, removed plainly and with Optimal Brain Surgeon's answer of
the weights that stay; then the least weights by magnitude, by the diagonals of the empirical Fisher
(`fisher`) and of the GGN (`obd`), and by the surgeon's saliency (`obs`), at several sparsities: at once, one
after the other with one inverse (`greedy`), and with curvature measured anew (`iterated`). Saliencies take
the model to be at a minimum, which it is not; so all is done once more with the block at a minimum of its
own. Then whole heads. Curvature is measured on the first sequences; losses on them, and on others.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Shown
from curvescope.runs.work import State, work_through
from curvescope.studies.common.weight_changes import HELD_OUT, Halves, head_block, make_halves
from curvescope.studies.prune.analysis import (
    DENSE,
    PRODUCTS,
    BlockWork,
    Heads,
    Minimum,
    Samples,
    Sets,
    heads_piece,
    layers_with_heads,
)
from curvescope.studies.setting import ModelOnData, notes_of

if TYPE_CHECKING:
    pass

HEAD = 1  # of the last layer, where no block is asked for


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to remove. The defaults take two minutes on a CPU."""

    tokens: int = setting(1280, "of a text, in all; labeled texts and images: ⌈tokens / seq_len⌉ of them")
    seq_len: int = setting(32, "tokens of one sequence")
    held_out: float = setting(0.8, HELD_OUT)
    dtype: str = setting("float64", "float32 or float64; a single weight moves the loss by little")
    blocks: tuple[str, ...] = setting(
        (), "globs: what weights are removed from; by default a head's W_O in the last layer"
    )
    max_dense: int = setting(3000, "weights of a block whose GGN is written out; others go by products")
    damping: float = setting(0.1, "λ of (GGN + λ I)⁻¹, as a share of the mean diagonal")
    sparsities: tuple[float, ...] = setting((0.3, 0.6, 0.9), "shares of a block's weights that go")
    settle: int = setting(
        150, "gradients to bring a block to a minimum of its own, where all is done again; 0: not done"
    )
    iterate: bool = setting(True, "curvature anew at each of the sparsities, too")
    num_weights: int = setting(40, "single weights of each block")
    num_groups: int = setting(24, "random groups of each block")
    group_share: float = setting(0.05, "share of a block's weights that a random group has")
    heads: bool = setting(True, "whole heads, where the model says what they are")
    draws: int = setting(1000, "of the bootstrap")

    def __post_init__(self) -> None:
        as_tuples(self, "blocks", "sparsities")
        super().__post_init__()
        at_least(self, 6, "num_weights", "num_groups")  # fewer are in order by chance
        at_least(self, 0, "settle")
        at_least(self, 50, "draws")
        ends = (0.0, *self.sparsities, 1.0)
        if not self.sparsities or any(a >= b for a, b in pairwise(ends)):
            raise UsageError(f"expected sparsities between 0 and 1 that grow, got {self.sparsities}")
        if not 0 < self.group_share < 1:
            raise UsageError(f"expected group_share between 0 and 1, got {self.group_share}")
        if not self.damping > 0:
            raise UsageError(f"expected a damping above 0, got {self.damping}")


@dataclass(frozen=True)
class Pruned(Shown):
    """Removals of every block and every head."""

    model: str
    data: str
    loss: float
    held_out_loss: float
    gradient_norm: dict[str, float]  # by block: how far from a minimum
    minima: dict[str, Minimum]  # by block; empty where it was not asked for
    how: dict[str, str]  # by block: `dense` or `products`
    damping: float
    singles: dict[str, Samples]  # by block, and block at its minimum
    groups: dict[str, Samples]
    sets: dict[str, Sets]
    rounds: dict[str, Sets]  # iterated; empty where it was not asked for
    heads: dict[str, Heads]  # by layer, "L0"
    draws: int
    seed: int


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Pruned:
    """Remove and measure.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    halves = make_halves(cfg, cfg.held_out)
    problem = halves.problem
    works = _works(cfg, halves)
    layers = layers_with_heads(problem.model) if cfg.heads else []
    pieces = [piece for work in works for piece in work.pieces()]
    pieces += [heads_piece(cfg, halves, layer) for layer in layers]
    contents = fingerprint(problem.model, problem.batches, halves.held_out.batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    names = dict.fromkeys(work.name for work in works)
    return Pruned(
        model=problem.model.name,
        data=problem.batches.name,
        loss=problem.loss_value(),
        held_out_loss=halves.held_out.loss_value(),
        gradient_norm={work.name: float(problem.gradient(work.name).norm()) for work in works},
        minima={name: found.take(Minimum, f"minimum.{name}") for name in names} if cfg.settle else {},
        how={work.name: DENSE if work.dense else PRODUCTS for work in works},
        damping=cfg.damping,
        singles={work.key: found.take(Samples, f"weights.{work.key}") for work in works},
        groups={work.key: found.take(Samples, f"groups.{work.key}") for work in works},
        sets={work.key: found.take(Sets, f"sets.{work.key}") for work in works},
        rounds={name: found.take(Sets, f"iterated.{name}") for name in names} if cfg.iterate else {},
        heads={f"L{layer}": found.take(Heads, f"heads.L{layer}") for layer in layers},
        draws=cfg.draws,
        seed=cfg.seed,
        notes=notes_of(cfg, problem),
    )


def _works(cfg: Config, halves: Halves) -> list[BlockWork]:
    """Every block at the model's own weights, then at a minimum of its own."""
    places = (False, True) if cfg.settle else (False,)
    blocks = halves.problem.space(*(cfg.blocks or [head_block(halves.problem.model, HEAD)]))
    return [BlockWork(cfg, halves, b.name, b.size, at_minimum=at) for b in blocks for at in places]
