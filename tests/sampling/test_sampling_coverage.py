"""Sampling intervals of the operators themselves hold the mean over samples, on data without end."""

from __future__ import annotations

import numpy as np
import pytest

import curvescope as cs
from curvescope.train import TrainConfig, train

REPEATS = 60


@pytest.mark.slow
@pytest.mark.parametrize("quantity", ["trace", "norm", "largest"])
def test_intervals_of_the_markov_task_hold_the_mean_over_samples(quantity):
    options = {"length": 8, "vocab": 6, "seed": 0}
    shape = cs.TransformerConfig(n_layers=1, d_model=8, n_heads=2, d_ff=8, n_ctx=8, vocab_size=6)
    data = cs.task_data("markov", num_sequences=256, sample_seed=1, **options)
    model, _, _ = train(cs.load(cs.Transformer(shape)), data, TrainConfig(steps=200, lr=1e-2))
    numbers = []
    for seed in range(REPEATS):
        sample = cs.task_data("markov", num_sequences=24, sample_seed=100 + seed, **options)
        op = cs.GGN(cs.Problem(model, sample), "L0.b_1")
        numbers.append(cs.sampling_error(op, quantity, num_probes=8, seed=seed))
    mean = np.mean([number.value for number in numbers])
    held = np.mean([number.low <= mean <= number.high for number in numbers])
    assert held >= 0.85  # 0.95 of 60, less three standard errors
    assert all(number.sampling > 0 for number in numbers)
