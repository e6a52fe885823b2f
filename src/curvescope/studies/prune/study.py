"""The study `prune`: what the removal of weights does to the loss, as predicted and as measured.

Of every block: single weights and random groups, removed plainly and with Optimal Brain Surgeon's answer of
the weights that stay; then the least weights by magnitude, by the diagonals of the empirical Fisher
(`fisher`) and of the GGN (`obd`), and by the surgeon's saliency (`obs`), at several sparsities: at once, one
after the other with one inverse (`greedy`), and with curvature measured anew (`iterated`). Then whole heads.
Curvature is measured on the first sequences; losses on them, and on others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from curvescope.core.config import as_tuples, at_least, setting
from curvescope.core.errors import UsageError
from curvescope.core.progress import Progress
from curvescope.operators import GGN
from curvescope.runs.contents import fingerprint
from curvescope.runs.shown import Claim, Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies.prune import claims, tables, words
from curvescope.studies.prune.heads import Heads, layers_with_heads, measure_heads
from curvescope.studies.prune.removals import (
    Make,
    Samples,
    Sets,
    iterated,
    one_shot,
    random_groups,
    sample,
    single_weights,
)
from curvescope.studies.prune.surgeons import (
    DENSE,
    PRODUCTS,
    DenseBlock,
    DenseSurgeon,
    ProductSurgeon,
    Surgeon,
    dense_block,
)
from curvescope.studies.setting import ModelOnData, notes_of
from curvescope.studies.weight_changes import HELD_OUT, Halves, make_halves, weights

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Config(ModelOnData):
    """What to remove. The defaults take two minutes on a CPU."""

    tokens: int = setting(1280, "of a text, in all; labelled texts and images: ⌈tokens / seq_len⌉ of them")
    seq_len: int = setting(32, "tokens of one sequence")
    held_out: float = setting(0.8, HELD_OUT)
    dtype: str = setting("float64", "float32 or float64; a single weight moves the loss by little")
    blocks: tuple[str, ...] = setting(("L3.h0.W_O", "L3.h0.W_V"), "globs: what weights are removed from")
    max_dense: int = setting(3000, "weights of a block whose GGN is written out; others go by products")
    damping: float = setting(0.1, "λ of (GGN + λ I)⁻¹, as a share of the mean diagonal")
    sparsities: tuple[float, ...] = setting((0.25, 0.5, 0.75), "shares of a block's weights that go")
    iterate: bool = setting(True, "curvature anew at each of the sparsities, too")
    num_weights: int = setting(40, "single weights of each block")
    num_groups: int = setting(24, "random groups of each block")
    group_share: float = setting(0.05, "share of a block's weights that a random group has")
    heads: bool = setting(True, "whole heads, where the model says what they are")
    draws: int = setting(1000, "of the bootstrap")

    def __post_init__(self) -> None:
        as_tuples(self, "blocks", "sparsities")
        super().__post_init__()
        at_least(self, 3, "num_weights", "num_groups")
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
    how: dict[str, str]  # by block: `dense` or `products`
    damping: float
    singles: dict[str, Samples]  # by block
    groups: dict[str, Samples]
    sets: dict[str, Sets]
    rounds: dict[str, Sets]  # iterated; empty where it was not asked for
    heads: dict[str, Heads]  # by layer, "L0"
    draws: int
    seed: int

    def claims(self) -> list[Claim]:
        """What is said about saliencies, next to what was measured."""
        return claims.judge(self)

    def summary(self) -> list[Line]:
        """The numbers to look at first: label, value, words."""
        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Sets by method, samples, rank correlations, heads."""
        return tables.frames(self)

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.studies.prune import figures

        return figures.draw(self)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Pruned:
    """Remove and measure.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the study goes, used when it goes on.
    """
    halves = make_halves(cfg, cfg.held_out)
    problem = halves.problem
    sizes = {block.name: block.size for block in problem.space(*cfg.blocks)}
    layers = layers_with_heads(problem.model) if cfg.heads else []
    pieces = [piece for name, size in sizes.items() for piece in _block_pieces(cfg, halves, name, size)]
    pieces += [_heads_piece(cfg, halves, layer) for layer in layers]
    contents = fingerprint(problem.model, problem.batches, halves.held_out.batches)
    found = work_through(pieces, contents=contents, progress=progress, state=state)
    return Pruned(
        model=problem.model.name,
        data=problem.batches.name,
        loss=problem.value(),
        held_out_loss=halves.held_out.value(),
        gradient_norm={name: float(problem.gradient(name).norm()) for name in sizes},
        how={name: DENSE if size <= cfg.max_dense else PRODUCTS for name, size in sizes.items()},
        damping=cfg.damping,
        singles={name: found.take(Samples, f"weights.{name}") for name in sizes},
        groups={name: found.take(Samples, f"groups.{name}") for name in sizes},
        sets={name: found.take(Sets, f"sets.{name}") for name in sizes},
        rounds={name: found.take(Sets, f"iterated.{name}") for name in sizes} if cfg.iterate else {},
        heads={f"L{layer}": found.take(Heads, f"heads.L{layer}") for layer in layers},
        draws=cfg.draws,
        seed=cfg.seed,
        notes=notes_of(cfg, problem),
    )


def _ggn(cfg: Config, halves: Halves, block: str) -> GGN:
    how: dict[str, Any] = {"engine": cfg.engine, "checkpoint": cfg.checkpoint}
    return GGN(halves.problem, block, **how)


def _block_pieces(cfg: Config, halves: Halves, name: str, size: int) -> list[Piece]:
    """The work on one block; where it is small, its GGN first, for all that follows."""
    dense = size <= cfg.max_dense
    first = Piece(f"curvature.{name}", lambda: dense_block(_ggn(cfg, halves, name)), f"GGN of {name}")
    needs = (first.name,) if dense else ()

    def surgeon(*known: DenseBlock) -> Surgeon:
        if not known:
            return ProductSurgeon(_ggn(cfg, halves, name), cfg.damping, cfg.seed)
        return DenseSurgeon(_tensor(halves, known[0]), cfg.damping)

    def make(known: tuple[DenseBlock, ...], here: Halves, left: torch.Tensor | None) -> Surgeon:
        if left is None:
            return surgeon(*known)
        op = _ggn(cfg, here, name)
        if not dense:
            return ProductSurgeon(op, cfg.damping, cfg.seed, left)
        return DenseSurgeon(_tensor(here, dense_block(op, left)), cfg.damping)

    def rounds(*known: DenseBlock) -> Sets:
        again: Make = partial(make, known)
        return iterated(halves, name, again, cfg.sparsities)

    w = weights(halves.problem, name)
    singles = single_weights(w, cfg.num_weights)
    groups = random_groups(w, cfg.num_groups, cfg.group_share, cfg.seed)
    works = {
        "weights": (lambda *k: sample(halves, name, surgeon(*k), singles), "single weights"),
        "groups": (lambda *k: sample(halves, name, surgeon(*k), groups), "random groups"),
        "sets": (lambda *k: one_shot(halves, name, surgeon(*k), cfg.sparsities), "least weights"),
        "iterated": (rounds, "least weights, curvature anew"),
    }
    wanted = [key for key in works if key != "iterated" or cfg.iterate]
    rest = [Piece(f"{key}.{name}", works[key][0], f"{name}: {works[key][1]}", needs=needs) for key in wanted]
    return [first, *rest] if dense else rest


def _tensor(halves: Halves, block: DenseBlock) -> torch.Tensor:
    return torch.as_tensor(block.matrix).to(halves.problem.device, halves.problem.dtype)


def _heads_piece(cfg: Config, halves: Halves, layer: int) -> Piece:
    def work() -> Heads:
        op = _ggn(cfg, halves, f"L{layer}.W_O")
        return measure_heads(halves, op, layer, damping=cfg.damping, seed=cfg.seed)

    return Piece(f"heads.L{layer}", work, f"heads of L{layer}", kind="heads")
