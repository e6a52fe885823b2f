"""What all questions are asked of: one task, one draw of embeddings per seed, and small networks.

The task is the paper's addition, with numbers of two digits: 9 tokens, of which the three digits of the sum
are predicted. Every network is given X = σ X₀, X₀ = E[token] + P[position] with standard normal E and P of
width 4 (fixed, not parameters), and gives 12 logits at each position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvescope.core.config import at_least, setting
from curvescope.core.seeds import generator
from curvescope.data.batches import Batch, Batches
from curvescope.data.tasks.addition import Targets, addition
from curvescope.losses import Loss
from curvescope.models.load import load
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.papers.common import FigureConfig
from curvescope.problem import Problem

DIGITS, TOKENS, CLASSES, WIDTH = 2, 9, 12, 4
BASE: dict[str, Any] = {
    "n_layers": 1, "d_model": WIDTH, "n_heads": 1, "d_ff": 5, "n_ctx": TOKENS, "norm": "none",
    "activation": "relu", "inputs": "continuous", "outputs": "regression", "n_out": CLASSES,
    "positions": "none", "init": "scaled", "bias_qkv": False, "bias_o": False, "bias_ff": False,
}  # fmt: skip
SMALL = (3e-4, 1e-3, 3e-3)  # scales at which exponents for small σ are fitted
DATA = (
    "addition of two numbers of two digits (9 tokens, cross-entropy of the three digits of the sum, "
    "{sequences} sequences), inputs σ(E + P) with standard normal E and P of width 4"
)


@dataclass(frozen=True)
class Config(FigureConfig):
    """How many networks. Quick: 5 seeds and 3 scales a decade, about two minutes; full: 20 and 6."""

    seeds: int = setting(0, "networks of each kind; 0: those of the profile, 5 and 20")
    sequences: int = setting(8, "sums of which curvature is measured")
    scales: int = setting(0, "of six decades; 0: those of the profile, 19 and 37")
    steps: int = setting(400, "of training, where one query-key matrix is compared with two")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "seeds", "scales")
        at_least(self, 1, "sequences", "steps")

    @property
    def count(self) -> int:
        """Seeds of each kind."""
        return self.seeds or (5 if self.profile == "quick" else 20)

    @property
    def decades(self) -> np.ndarray:
        """Six decades of σ."""
        return np.logspace(-4, 2, self.scales or (19 if self.profile == "quick" else 37))


def transformer(seed: int, **changes: Any) -> nn.Module:
    """The zoo's Transformer of 152 parameters, or with changes to it; float64."""
    return Transformer(TransformerConfig(**{**BASE, **changes, "seed": seed})).double()


def addition_batch(num: int, targets: Targets = "next") -> Batch:
    """The sums."""
    return next(iter(addition(num_sequences=num, digits=DIGITS, targets=targets)))


def embedded(batch: Batch, seed: int) -> Tensor:
    """X₀ = E[token] + P[position]: (n, 9, 4), the same for every network of a seed."""
    source = generator(seed, 1)
    E, P = (torch.randn(rows, WIDTH, generator=source, dtype=torch.float64) for rows in (CLASSES, TOKENS))
    assert isinstance(batch.inputs, Tensor)
    return E[batch.inputs] + P


def problem(
    module: nn.Module, X: Tensor, targets: Any, weights: Tensor | None = None,
    loss: str | Loss = "cross_entropy",
) -> Problem:  # fmt: skip
    """A network on these inputs and targets."""
    return Problem(load(module), Batches([Batch(X, targets, weights)]), loss)
