"""Whole heads: what comes out when a head's rows of W_O are zero, and the layer's other heads answer.

A head writes its values through W_O alone, so that these rows at zero are the head without output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from curvescope.algorithms.surgery.removal import diagonal_saliencies
from curvescope.core.result import Result
from curvescope.models.model import Model
from curvescope.operators import GGN
from curvescope.problem import Problem
from curvescope.studies.prune.removals import removal
from curvescope.studies.prune.surgeons import ProductSurgeon, fisher_diagonal
from curvescope.studies.weight_changes import Effects, Halves, effects, weights


@dataclass(frozen=True)
class Heads(Result):
    """The heads of one layer, removed one at a time."""

    layer: int
    magnitude: np.ndarray  # (h,) Σ w² over the head's rows of W_O
    fisher: np.ndarray  # (h,) ½ Σ F_qq w²
    obd: np.ndarray  # (h,) ½ Σ G_qq w², from an estimated diagonal
    obs: np.ndarray  # (h,) ½ δᵀ (G + λ I) δ of the surgeon's change
    plain: Effects
    compensated: Effects
    residual: np.ndarray  # (h,) of the surgeon's systems


def layers_with_heads(model: Model) -> list[int]:
    """Layers whose W_O is cut into heads."""
    count = int(model.facts.get("n_layers", 0))
    names = model.blocks
    return [i for i in range(count) if f"L{i}.W_O" in names and num_heads(model) > 1]


def num_heads(model: Model) -> int:
    """Heads of a layer; 1 where it is not known."""
    return int(model.facts.get("n_heads", 1) or 1)


def measure_heads(halves: Halves, op: GGN, layer: int, *, damping: float, seed: int) -> Heads:
    """Remove every head of a layer, plain and with the other heads' answer in W_O, of which `op` is."""
    problem, block = halves.problem, f"L{layer}.W_O"
    w, surgeon = weights(problem, block), ProductSurgeon(op, damping, seed)
    fisher = diagonal_saliencies(w, fisher_diagonal(problem, block))
    obd = diagonal_saliencies(w, surgeon.diagonal)
    sets = [_rows(problem, block, layer, head) for head in range(num_heads(problem.model))]
    made = [surgeon.remove(w, removed) for removed in sets]
    found = effects(halves, block, [*(removal(w, r) for r in sets), *(one.delta for one, _ in made)])
    return Heads(
        layer=layer,
        magnitude=np.array([float(w[r].square().sum()) for r in sets]),
        fisher=np.array([float(fisher[r].sum()) for r in sets]),
        obd=np.array([float(obd[r].sum()) for r in sets]),
        obs=np.array([one.increase for one, _ in made]),
        plain=found.some(slice(0, len(sets))),
        compensated=found.some(slice(len(sets), None)),
        residual=np.array([residual for _, residual in made]),
    )


def _rows(problem: Problem, block: str, layer: int, head: int) -> torch.Tensor:
    """Positions of a head's weights within W_O."""
    own = problem.space(f"L{layer}.h{head}.W_O")
    ones = own.scatter(torch.ones(own.size, dtype=problem.dtype, device=problem.device))
    return problem.space(block).gather(ones).nonzero()[:, 0]
