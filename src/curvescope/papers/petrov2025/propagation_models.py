"""Models of the figure `propagation`: small Transformers on a Markov chain, one property varied at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from curvescope.data.tasks.random_sequences import markov
from curvescope.models.load import load
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.problem import Problem
from curvescope.train import TrainConfig, train

VOCAB, LENGTH, SEQUENCES = 8, 16, 8
BASE = {
    "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "n_ctx": LENGTH, "vocab_size": VOCAB,
    "init": "scaled",
}  # fmt: skip
SMALL = BASE | {"n_layers": 1, "d_model": 8, "d_ff": 16}
NORMS = ("pre", "post", "none")
WIDTHS = (8, 16, 32)
SIGMAS = (1.0, 0.3, 0.1, 0.03, 0.01)
COMPONENTS: dict[str, dict[str, Any]] = {
    "everything": {},
    "no residual": {"residual": False},
    "no norm": {"norm": "none"},
    "no feed-forward": {"d_ff": 0},
    "one head": {"n_heads": 1},
}


class Variant(NamedTuple):
    """A model to measure: its settings, its seed, and its number of training steps."""

    settings: dict[str, Any]
    seed: int
    steps: int = 0

    def problem(self) -> Problem:
        """Return the model in float64 on Markov chains of its own seed."""
        module = Transformer(TransformerConfig(**{**BASE, **self.settings, "seed": self.seed}))
        model = load(module.double())
        data = markov(num_sequences=SEQUENCES, length=LENGTH, vocab=VOCAB, seed=self.seed)
        if self.steps:
            cfg = TrainConfig(steps=self.steps, lr=3e-3, warmup=10)
            with torch.random.fork_rng(devices=[]):
                model, _, _ = train(model, data, cfg)
        return Problem(model, data)


def by_depth(depths: tuple[int, ...], seeds: int) -> dict[str, Variant]:
    """Depth × norm placement × seeds."""
    return {
        f"depth.{norm}.{layers}.{seed}": Variant({"norm": norm, "n_layers": layers}, seed)
        for norm in NORMS
        for layers in depths
        for seed in range(seeds)
    }


def by_width(seeds: int) -> dict[str, Variant]:
    """Width × seeds, pre-norm."""
    return {
        f"width.{width}.{seed}": Variant({"d_model": width, "d_ff": 2 * width}, seed)
        for width in WIDTHS
        for seed in range(seeds)
    }


def by_sigma(seeds: int) -> dict[str, Variant]:
    """Scale of the first norm's input: embeddings only, with ε = 0."""
    return {
        f"sigma.{sigma:g}.{seed}": Variant(
            {"n_layers": 1, "embed_std": sigma, "positions": "none", "norm_eps": 1e-20}, seed
        )
        for sigma in SIGMAS
        for seed in range(seeds)
    }


def by_component(steps: int, seeds: int) -> dict[str, Variant]:
    """Variants with and without each component, initial and trained; small enough for a dense Hessian."""
    return {
        f"component.{name}.{trained}.{seed}": Variant({**SMALL, **settings}, seed, trained)
        for name, settings in COMPONENTS.items()
        for trained in (0, steps)
        for seed in range(seeds)
    }
