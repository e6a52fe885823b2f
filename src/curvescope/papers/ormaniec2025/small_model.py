"""Model and data of the heat map and the histograms: d = 16, one layer, addition of two numbers.

The weights are those of the paper: drawn in float32 on the CPU from seed 1234 in the order of its framework,
which equals that of the zoo's scheme "scaled", and converted to float64.
"""

from __future__ import annotations

from typing import Literal

from curvescope.data.batches import Batches
from curvescope.data.tasks import task_data
from curvescope.models.load import load
from curvescope.models.zoo.transformer import TransformerConfig
from curvescope.problem import Problem

SEED = 1234
Kind = Literal["softmax", "linear"]
IN_WORDS = (
    "Data: 64 sums of two five-digit numbers, 18 tokens, cross-entropy of the six digits of the sum. "
    "Model: a one-layer Transformer at initialization, one head, width 16, ReLU feed-forward of width "
    "64, skips, no norm."
)


def small_problem(attention: Kind, batches: Batches, *, device: str = "cpu") -> Problem:
    """Return the problem of the six digits of the sum, with cross-entropy in float64."""
    config = TransformerConfig(
        n_layers=1,
        d_model=16,
        n_heads=1,
        d_ff=64,
        n_ctx=18,
        vocab_size=12,
        attention=attention,
        norm="none",
        activation="relu",
        bias_u=True,
        init="scaled",
        seed=SEED,
    )
    return Problem(load(config, dtype="float64", device=device), batches)


def heatmap_data() -> Batches:
    """Return the batch of 64 sums of the heat map, the same as in the sweeps."""
    return task_data("addition")


def histogram_data() -> Batches:
    """Return the 8 batches of 8 sums of the histograms; in some sums, columns are made to add up to nine."""
    return task_data("addition", draw_size=8, batch_size=8, sum_to_nine="coin")
