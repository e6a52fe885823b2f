"""The training loop: it learns, leaves its input alone, and is reproducible."""

import numpy as np
import pytest
import torch

import curvescope as cs
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.train import TrainConfig, train


def small_model() -> cs.Model:
    return cs.load(cs.TransformerConfig(n_layers=1, d_model=16, n_heads=2, vocab_size=8, n_ctx=12, seed=3))


def test_it_learns_and_leaves_the_model_as_it_was():
    model = small_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    batches = cs.task_data("sorting", num_sequences=64, batch_size=32)
    cfg = TrainConfig(steps=60, lr=1e-2, warmup=5, snapshots=(0, 60))
    trained, history, kept = train(model, batches, cfg)
    assert history.loss[-5:].mean() < 0.7 * history.loss[0]
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert all(torch.equal(before[name], kept[0][name]) for name in before)
    assert all(torch.equal(p, kept[60][name]) for name, p in trained.named_parameters())
    assert len(history.to_frame()) == 60
    again = train(model, batches, cfg)[1]
    np.testing.assert_array_equal(history.loss, again.loss)


def test_divergence_is_an_error():
    batches = cs.task_data("sorting", num_sequences=16)
    with pytest.raises(CurvescopeError, match="diverged"):
        train(small_model(), batches, TrainConfig(steps=40, lr=1e30, warmup=1, clip=1e30))


def test_no_steps_are_refused():
    with pytest.raises(UsageError, match="at least one step"):
        train(small_model(), cs.task_data("sorting"), TrainConfig(steps=0))
