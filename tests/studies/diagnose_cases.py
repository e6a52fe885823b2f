"""A small problem to be diagnosed, and how hard to look at it."""

from __future__ import annotations

from typing import Any

import curvescope as cs
from curvescope.data.tasks import task_data
from curvescope.models.load import load
from curvescope.studies import diagnose

CFG = diagnose.Config(
    engine="autograd",
    num_probes=2,
    num_steps=6,
    num_shared=3,
    part_steps=4,
    block_steps=0,
    num_sample_probes=2,
)
SHAPE = {
    "n_layers": 3,
    "n_heads": 2,
    "d_model": 8,
    "d_ff": 12,
    "n_ctx": 32,
    "vocab_size": 8,
    "init": "xavier",
}


def problem(**settings: Any) -> cs.Problem:
    batches = task_data("markov", num_sequences=8, length=8, vocab=8, batch_size=8)
    return cs.Problem(load(cs.Transformer(cs.TransformerConfig(**{**SHAPE, **settings}))), batches)
