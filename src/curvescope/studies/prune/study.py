"""Study `prune`: the effect of removing weights on the loss, predicted by curvature and measured.

In every block it removes single weights and random groups, plain and compensated by Optimal Brain Surgeon,
which adjusts the remaining weights. It then removes the weights of least magnitude, and of least saliency by
the diagonals of the empirical Fisher (`fisher`) and of the GGN (`obd`) and by the surgeon (`obs`), at several
sparsities: all at once, one by one with one inverse (`greedy`), and with curvature measured anew
(`iterated`). Saliencies assume that the model is at a minimum, which is not true. Therefore the study repeats
all removals after minimizing the loss over the block. Finally it removes single heads. Curvature is measured
on the first sequences, losses on these and on held-out ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from curvescope.core.config import setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.runs.fingerprints import fingerprint
from curvescope.runs.resumable_loop import State, work_through
from curvescope.runs.study_result import Shown
from curvescope.studies.common.weight_changes import HELD_OUT, Halves, head_block, make_halves
from curvescope.studies.problem_config import ModelOnData, notes_of
from curvescope.studies.prune import analysis

HEAD = 1  # the head of the last layer whose block is the default


@dataclass(frozen=True)
class Config(ModelOnData):
    """Settings of the study. The defaults take two minutes on a CPU."""

    tokens: int = setting(
        1280, "tokens read from a text in total; for labeled texts and images: ⌈tokens / seq_len⌉ examples"
    )
    seq_len: int = setting(32, "tokens of one sequence")
    held_out: float = setting(0.8, HELD_OUT)
    dtype: str = setting(
        "float64", "float32 or float64; removing a single weight changes the loss only a little"
    )
    blocks: tuple[str, ...] = setting(
        (), "glob patterns of blocks to prune; by default a head's W_O in the last layer"
    )
    max_dense: int = setting(3000, "largest block whose GGN is written out; larger ones use products")
    damping: float = setting(0.1, "λ of (GGN + λ I)⁻¹, relative to the mean diagonal")
    sparsities: tuple[float, ...] = setting((0.3, 0.6, 0.9), "shares of a block's weights to remove")
    settle: int = setting(
        150,
        "most gradients for minimizing the loss over a block before repeating all removals; 0: no repetition",
        least=0,
    )
    iterate: bool = setting(True, "also remove weights with curvature measured anew at each sparsity")
    num_weights: int = setting(40, "single weights removed from each block", least=6)
    num_groups: int = setting(24, "random groups removed from each block", least=6)
    group_share: float = setting(0.05, "share of a block's weights in a random group")
    heads: bool = setting(True, "also remove single heads, if the model describes its heads")
    draws: int = setting(1000, "bootstrap samples", least=50)

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = (0.0, *self.sparsities, 1.0)
        if not self.sparsities or any(a >= b for a, b in pairwise(ends)):
            raise UsageError(f"expected increasing sparsities between 0 and 1, got {self.sparsities}")
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
    gradient_norm: dict[str, float]  # by block: norm of the gradient, zero at a minimum
    minima: dict[str, analysis.BlockMinimum]  # by block; empty if settle = 0
    how: dict[str, str]  # by block: `dense` or `products`
    damping: float
    singles: dict[str, analysis.RemovalSamples]  # by block, and by block at its minimum
    groups: dict[str, analysis.RemovalSamples]
    sets: dict[str, analysis.RemovalSets]
    rounds: dict[str, analysis.RemovalSets]  # iterated; empty if iterate = false
    heads: dict[str, analysis.HeadRemovals]  # by layer, "L0"
    draws: int
    seed: int


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Pruned:
    """Remove weights and heads, and measure the loss."""
    halves = make_halves(cfg, cfg.held_out)
    problem = halves.problem
    works = _works(cfg, halves)
    layers = analysis.layers_with_heads(problem.model) if cfg.heads else []
    pieces = [piece for work in works for piece in work.pieces()]
    pieces += [analysis.heads_piece(cfg, halves, layer) for layer in layers]
    contents = fingerprint(problem.model, problem.batches, halves.held_out.batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    names = dict.fromkeys(work.name for work in works)
    return Pruned(
        model=problem.model.name,
        data=problem.batches.name,
        loss=problem.loss_value(),
        held_out_loss=halves.held_out.loss_value(),
        gradient_norm={work.name: float(problem.gradient(work.name).norm()) for work in works},
        minima={name: found.take(analysis.BlockMinimum, f"minimum.{name}") for name in names}
        if cfg.settle
        else {},
        how={work.name: analysis.DENSE if work.dense else analysis.PRODUCTS for work in works},
        damping=cfg.damping,
        singles={work.key: found.take(analysis.RemovalSamples, f"weights.{work.key}") for work in works},
        groups={work.key: found.take(analysis.RemovalSamples, f"groups.{work.key}") for work in works},
        sets={work.key: found.take(analysis.RemovalSets, f"sets.{work.key}") for work in works},
        rounds={name: found.take(analysis.RemovalSets, f"iterated.{name}") for name in names}
        if cfg.iterate
        else {},
        heads={f"L{layer}": found.take(analysis.HeadRemovals, f"heads.L{layer}") for layer in layers},
        draws=cfg.draws,
        seed=cfg.seed,
        notes=notes_of(cfg, problem),
    )


def _works(cfg: Config, halves: Halves) -> list[analysis.BlockWork]:
    """Return the work for every block at its original weights and at its minimum."""
    places = (False, True) if cfg.settle else (False,)
    blocks = halves.problem.space(*(cfg.blocks or [head_block(halves.problem.model, HEAD)]))
    return [analysis.BlockWork(cfg, halves, b.name, b.size, at_minimum=at) for b in blocks for at in places]
