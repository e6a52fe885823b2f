"""The work on one block at one place: at the model's own weights, or at a minimum of the block's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from curvescope.core.result import Result
from curvescope.operators import GGN
from curvescope.runs.work import Piece
from curvescope.studies.prune.heads import Heads, measure_heads
from curvescope.studies.prune.minimum import Minimum, descend
from curvescope.studies.prune.removals import (
    Samples,
    Sets,
    iterated,
    one_shot,
    random_groups,
    sample,
    single_weights,
)
from curvescope.studies.prune.surgeons import (
    DenseBlock,
    DenseSurgeon,
    ProductSurgeon,
    Surgeon,
    dense_block,
)
from curvescope.studies.weight_changes import Halves, moved_parameters, weights

if TYPE_CHECKING:
    from curvescope.studies.prune.study import Config

AT_MINIMUM = " at its minimum"


@final
class BlockWork:
    """Pieces of work, which are given the minimum and the GGN where there are any."""

    def __init__(self, cfg: Config, halves: Halves, name: str, size: int, *, at_minimum: bool):
        self.cfg, self.name, self._halves, self._at_minimum = cfg, name, halves, at_minimum
        self.dense = size <= cfg.max_dense
        self.key = name + AT_MINIMUM * at_minimum

    def pieces(self) -> list[Piece]:
        """In order; curvature first, for all that follows."""
        first: list[Piece] = []
        if self._at_minimum:
            first.append(Piece(f"minimum.{self.name}", self.minimum, f"a minimum over {self.name}"))
        before = tuple(piece.name for piece in first)
        if self.dense:
            curvature = Piece(f"curvature.{self.key}", self.curvature, f"GGN of {self.key}", needs=before)
            first.append(curvature)
        needs = tuple(piece.name for piece in first)
        works = {"weights": self.singles, "groups": self.groups, "sets": self.sets}
        words = {"weights": "single weights", "groups": "random groups", "sets": "least weights"}
        if self.cfg.iterate and not self._at_minimum:
            works["iterated"], words["iterated"] = self.rounds, "least weights, curvature anew"
        return first + [
            Piece(f"{kind}.{self.key}", work, f"{self.key}: {words[kind]}", needs=needs)
            for kind, work in works.items()
        ]

    def minimum(self) -> Minimum:
        """The place."""
        return descend(self._halves.problem, self.name, self.cfg.settle)

    def curvature(self, *known: Result) -> DenseBlock:
        """The GGN, written out."""
        return dense_block(ggn(self.cfg, self.here(known), self.name))

    def singles(self, *known: Result) -> Samples:
        """Single weights."""
        halves = self.here(known)
        sets = single_weights(weights(halves.problem, self.name), self.cfg.num_weights)
        return sample(halves, self.name, self.surgeon(known), sets)

    def groups(self, *known: Result) -> Samples:
        """Random groups."""
        halves, cfg = self.here(known), self.cfg
        w = weights(halves.problem, self.name)
        sets = random_groups(w, cfg.num_groups, cfg.group_share, cfg.seed)
        return sample(halves, self.name, self.surgeon(known), sets)

    def sets(self, *known: Result) -> Sets:
        """The least weights by every method, at once."""
        return one_shot(self.here(known), self.name, self.surgeon(known), self.cfg.sparsities)

    def rounds(self, *known: Result) -> Sets:
        """The least weights, with curvature anew at each sparsity."""

        def make(here: Halves, left: Tensor | None) -> Surgeon:
            if left is None:
                return self.surgeon(known)
            op, cfg = ggn(self.cfg, here, self.name), self.cfg
            if not self.dense:
                return ProductSurgeon(op, cfg.damping, cfg.seed, left)
            return DenseSurgeon(_tensor(here, dense_block(op, left)), cfg.damping)

        return iterated(self.here(known), self.name, make, self.cfg.sparsities)

    def here(self, known: tuple[Result, ...]) -> Halves:
        """The problems at this place."""
        if not self._at_minimum:
            return self._halves
        minimum = next(one for one in known if isinstance(one, Minimum))
        w = weights(self._halves.problem, self.name)
        delta = torch.as_tensor(minimum.delta).to(w)
        return Halves(*(p.at(moved_parameters(p, self.name, delta)) for p in self._halves))

    def surgeon(self, known: tuple[Result, ...]) -> Surgeon:
        """With the GGN that is known, or by products."""
        for one in known:
            if isinstance(one, DenseBlock):
                return DenseSurgeon(_tensor(self._halves, one), self.cfg.damping)
        return ProductSurgeon(ggn(self.cfg, self.here(known), self.name), self.cfg.damping, self.cfg.seed)


def heads_piece(cfg: Config, halves: Halves, layer: int) -> Piece:
    """The heads of one layer."""

    def work() -> Heads:
        op = ggn(cfg, halves, f"L{layer}.W_O")
        return measure_heads(halves, op, layer, damping=cfg.damping, seed=cfg.seed)

    return Piece(f"heads.L{layer}", work, f"heads of L{layer}", kind="heads")


def ggn(cfg: Config, halves: Halves, block: str) -> GGN:
    """Of a block, executed as the settings say."""
    how: dict[str, Any] = {"engine": cfg.engine, "checkpoint": cfg.checkpoint}
    return GGN(halves.problem, block, **how)


def _tensor(halves: Halves, block: DenseBlock) -> Tensor:
    return torch.as_tensor(block.matrix).to(halves.problem.device, halves.problem.dtype)
