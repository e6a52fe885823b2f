"""The models on which the slides' statements are tried: one condition changed at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from curvescope.data.tasks.random_sequences import markov
from curvescope.models.load import load
from curvescope.models.zoo.transformer import Transformer, TransformerConfig
from curvescope.problem import Problem
from curvescope.studies import sinks
from curvescope.studies.setting import make_problem
from curvescope.studies.sinks.analysis import HOWS
from curvescope.train import TrainConfig, train

TRAINED, INITIAL = "bundled, trained", "bundled, initial"
ZOO: dict[str, Any] = {
    "n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "n_ctx": 24, "vocab_size": 8, "init": "scaled",
}  # fmt: skip
LENGTH, SEQUENCES, STEPS = 16, 12, 200
FEW = ("bias", "inserted", "activation")


class Case(NamedTuple):
    """A model: a checkpoint of the bundled one, or a zoo Transformer on a Markov chain."""

    revision: str | None = None
    zoo: dict[str, Any] | None = None
    steps: int = 0
    everything: bool = False  # all ways and all strengths, and blocks

    def config(self, *, full: bool, device: str) -> sinks.Config:
        """The settings of the study `sinks`."""
        hows = tuple(HOWS) if full or self.everything else FEW
        biases = (1.0, 2.0, 4.0, 8.0) if full or self.everything else (2.0, 8.0)
        settings: dict[str, Any] = {"hows": hows, "biases": biases, "strengths": (4.0,), "gates": (0.9,)}
        settings |= {"block_steps": 8 if full or self.everything else 0}
        if full:
            settings |= {"strengths": (1.0, 2.0, 4.0), "gates": (0.5, 0.9), "num_probes": 8, "num_steps": 24}
            settings |= {"ggn_steps": 16, "tokens": 960 if self.zoo is None else 192, "texts": 5}
        return sinks.Config(revision=self.revision, device=device, **settings)

    def problem(self, cfg: sinks.Config) -> Problem:
        """The model on its data; a zoo model in float64."""
        if self.zoo is None:
            return make_problem(cfg)
        model = load(Transformer(TransformerConfig(**{**ZOO, **self.zoo})).double(), device=cfg.device)
        data = markov(num_sequences=SEQUENCES, length=LENGTH, vocab=ZOO["vocab_size"], seed=0)
        if self.steps:
            with torch.random.fork_rng(devices=[]):
                model, _, _ = train(model, data, TrainConfig(steps=self.steps, lr=3e-3, warmup=10))
        return Problem(model, data)


CASES = {
    TRAINED: Case(everything=True),
    INITIAL: Case(revision="initial"),
    "small, norms, trained": Case(zoo={"norm": "pre"}, steps=STEPS),
    "small, no norms, trained": Case(zoo={"norm": "none"}, steps=STEPS),
    "small, no norms, initial": Case(zoo={"norm": "none"}),
}
"""By condition."""
