"""Effect of a change of weights on the loss: predicted by derivatives, measured, and measured on held-out
data.

With ΔL(δ) = L(θ + δ) − L(θ) the prediction is gᵀδ + ½ δᵀHδ, with the full Hessian of the blocks that δ
changes. All numbers are stored per sequence, so two changes are compared on the same sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.result import Result
from curvescope.data.batches import Batch, Batches
from curvescope.models.model import Model
from curvescope.models.parameter_selection import Params
from curvescope.operators import per_sample
from curvescope.problem import Problem
from curvescope.studies.common.statistics import Interval, mean_interval
from curvescope.studies.problem_config import ModelOnData, make_problem

Part = Literal["first", "second", "predicted", "measured", "held_out"]
CHANGED = ("first", "second", "measured", "held_out")  # the arrays with one row per change
HELD_OUT = "share of sequences held out, the last ones, for losses only"


class Halves(NamedTuple):
    """Problems of one model on two parts of the data."""

    problem: Problem  # curvature and losses
    held_out: Problem  # losses


def make_halves(cfg: ModelOnData, share: float) -> Halves:
    """Build the problem of the settings, and hold out the last `share` of its sequences."""
    if not 0 < share < 1:
        raise UsageError(f"expected held_out between 0 and 1, got {share!r}")
    whole = make_problem(cfg)
    batches, count = whole.batches, whole.batches.num_sequences
    if count < 2:
        raise UsageError("expected at least two sequences, one of them to hold out", hint="more tokens")
    first, rest = _cut(batches, min(max(count - round(share * count), 1), count - 1))
    made = [Batches(part, name=batches.name, notes=batches.notes) for part in (first, rest)]
    return Halves(*(Problem(whole.model, part, loss=whole.loss) for part in made))


def _cut(batches: Batches, count: int) -> tuple[list[Batch], list[Batch]]:
    """Split the batches into the first `count` sequences and the rest."""
    first, rest, seen = [], [], 0
    for batch in batches:
        own = min(max(count - seen, 0), batch.num_sequences)
        first += [batch[:own]] if own else []
        rest += [batch[own:]] if own < batch.num_sequences else []
        seen += batch.num_sequences
    return first, rest


@dataclass(frozen=True)
class Effects(Result):
    """Effects of K changes, per sequence: the mean over the last axis is the change of the loss."""

    first: np.ndarray  # (K, X) gᵀδ
    second: np.ndarray  # (K, X) ½ δᵀHδ
    measured: np.ndarray  # (K, X)
    held_out: np.ndarray  # (K, Y)
    shares: np.ndarray | None = None  # (X,) N_x X / N for N_x counted tokens; None: equal shares
    held_shares: np.ndarray | None = None  # (Y,)

    @property
    def predicted(self) -> np.ndarray:
        """Predicted change gᵀδ + ½ δᵀHδ: (K, X)."""
        return self.first + self.second

    def some(self, which: slice | np.ndarray) -> Effects:
        """Select some of the changes."""
        return replace(self, **{name: getattr(self, name)[which] for name in CHANGED})

    def shares_of(self, part: Part) -> np.ndarray | None:
        """Shares of the sequences of a part."""
        return self.held_shares if part == "held_out" else self.shares

    def interval(self, part: Part, change: int) -> Interval:
        """Mean and interval of a part of one change, over its sequences."""
        return mean_interval(getattr(self, part)[change], self.shares_of(part))


def effects(halves: Halves, block: Params, changes: Sequence[Tensor], *, held_out: bool = True) -> Effects:
    """Measure the effects of changes δ, (n,) each, of the matching blocks; the model is left unchanged.

    Args:
        held_out: Also measure losses on the held-out data; otherwise Y = 0.
    """
    problem = halves.problem
    samples, others = (per_sample(one, block) for one in halves)
    columns = _columns(changes, samples.space.size)
    own, theirs = _shares(samples.shares), _shares(others.shares)
    with samples.frozen(), others.frozen():
        first, second = samples.gradient_products(columns).T, samples.forms(columns).T / 2
        before, before_others = samples.losses(), others.losses()
        measured, held = [], []
        for delta in columns.T:
            moved = moved_parameters(problem, block, delta)
            measured.append(samples.losses(moved) - before)
            if held_out:
                held.append((others.losses(moved) - before_others) * theirs)
    found = np.array(held) if held_out else np.zeros((len(measured), 0))
    theirs = theirs if held_out else theirs[:0]
    return Effects(first * own, second * own, np.array(measured) * own, found, own, theirs)


def moved_parameters(problem: Problem, block: Params, delta: Tensor) -> dict[str, Tensor]:
    """Parameters θ + δ that the block belongs to, by name."""
    parameters = dict(problem.named_parameters())
    return {name: parameters[name].detach() + d for name, d in problem.space(block).scatter(delta).items()}


def weights(problem: Problem, block: Params) -> Tensor:
    """Copy of the weights w (n,) of a block or blocks."""
    return problem.space(block).gather({n: p.detach() for n, p in problem.named_parameters()}).clone()


def head_block(model: Model, head: int) -> str:
    """Name of a head's rows of W_O in the last layer, or of all of W_O; without W_O, the smallest matrix."""
    name = f"L{int(model.facts.get('n_layers', 0)) - 1}.W_O"
    if name in model.blocks:
        several = int(model.facts.get("n_heads", 1) or 1) > max(head, 1)
        return name.replace(".", f".h{head}.") if several else name
    return min((b for b in model.blocks.values() if len(b.shape) == 2), key=lambda b: b.size).name


def _columns(changes: Sequence[Tensor], size: int) -> Tensor:
    columns = torch.stack(list(changes), dim=1)
    assert columns.shape[0] == size, "a change has an entry for every weight of its block"
    return columns


def _shares(shares: np.ndarray) -> np.ndarray:
    """Shares N_x X / N; they are one for sequences of equal length."""
    return shares * len(shares)
