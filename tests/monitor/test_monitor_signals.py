"""What a measurement reads beside the curvature: attention, weight norms, moments, losses of the steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from monitor_loops import IDS, PROBE, TARGETS, tiny
from torch import nn
from torch.nn import functional as F

import curvescope as cs
from curvescope.models.running.attention_interventions import patterns

OFF = {"every": 2, "budget": 1.0, "blocks": False, "num_probes": 2}


def grown(factor: float) -> cs.Transformer:
    module = tiny()
    with torch.no_grad():
        module.get_parameter("L0.W_Q").mul_(factor)
        module.get_parameter("L0.W_K").mul_(factor)
    return module


def signals(module, optimizer=None):
    monitor = cs.CurvatureMonitor(module, PROBE, **OFF)
    return monitor.measure(0, optimizer)


@pytest.mark.parametrize("factor", [1.0, 60.0])
def test_entropy_is_that_of_the_patterns(factor):
    module = grown(factor)
    (P,) = patterns(cs.load(module), IDS[:3])
    entropy = (torch.special.entr(P).sum(-1) / torch.arange(1, 5).log().clamp_min(1e-9))[..., 1:].mean()
    assert signals(module)["attention_entropy"] == pytest.approx(float(entropy), rel=1e-5)


def test_scores_grow_with_the_product_of_queries_and_keys():
    small, large = (signals(grown(factor))["attention_logit_max"] for factor in (1.0, 10.0))
    assert large > 30 * small  # biases are not scaled


def test_pytorch_attention_is_seen_like_plain_products():
    class Plain(nn.Module):
        def __init__(self, fused: bool):
            super().__init__()
            source = torch.Generator().manual_seed(0)
            self.E = nn.Parameter(torch.randn(5, 4, generator=source, dtype=torch.float64))
            self.fused = fused

        def forward(self, ids):
            x = self.E[ids].view(*ids.shape, 2, 2).transpose(1, 2)
            if self.fused:
                y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
            else:
                seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
                y = (x @ x.mT / math.sqrt(2)).masked_fill(~seen, -math.inf).softmax(-1) @ x
            return y.transpose(1, 2).flatten(2) @ self.E.T

    fused, plain = (signals(Plain(kind)) for kind in (True, False))
    assert fused["attention_logit_max"] == pytest.approx(plain["attention_logit_max"])
    assert fused["attention_entropy_min"] == pytest.approx(plain["attention_entropy_min"], rel=1e-5)
    assert fused["attention_entropy_min"] < fused["attention_entropy"] < 1


def test_a_model_without_attention_has_no_numbers_of_it():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, y = torch.ones(2, 3, dtype=torch.float64), torch.tensor([0, 1])
    found = cs.CurvatureMonitor(net, [(X, y)], **OFF).measure(0)
    assert "attention_logit_max" not in found
    assert found["uniform_loss"] == pytest.approx(math.log(2))


def test_norms_of_blocks_add_up():
    module = tiny()
    monitor = cs.CurvatureMonitor(module, PROBE, **OFF)
    found = monitor.measure(0)
    norms = monitor.blocks.set_index("block")["weight_norm"]
    whole = torch.nn.utils.parameters_to_vector(module.parameters()).detach().norm()
    assert found["weight_norm"] == pytest.approx(float(whole))
    assert norms["L0.W_Q"] == pytest.approx(float(module.get_parameter("L0.W_Q").detach().norm()))


@pytest.mark.parametrize(("dtype", "can_decay"), [(torch.float32, True), (torch.bfloat16, False)])
def test_moments_in_half_precision_cannot_decay(dtype, can_decay):
    module = tiny()
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.999))
    F.cross_entropy(module(IDS).flatten(0, 1), TARGETS.flatten()).backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].to(dtype)
    found = signals(module, optimizer)
    assert (found["moment_resolution"] > 1) == can_decay
    assert found["preconditioner_formed"] == pytest.approx(0.001)
    v = torch.tensor(0.37, dtype=dtype)
    assert (float(v * 0.999) < float(v)) == can_decay


def train(monitor, module, steps):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in steps:
        loss = F.cross_entropy(module(IDS).flatten(0, 1), TARGETS.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(step, optimizer=optimizer, loss=loss)


def test_losses_of_all_steps_are_kept(tmp_path):
    module = tiny()
    with cs.CurvatureMonitor(module, PROBE, out=tmp_path / "run", **OFF) as monitor:
        train(monitor, module, range(6))
    steps = monitor.result().steps
    np.testing.assert_array_equal(steps["step"], np.arange(6))
    assert np.isfinite(steps["loss"]).all()
    assert monitor.history["train_loss"].tolist() == steps["loss"][[0, 2, 4]].tolist()
    lines = (tmp_path / "run" / "steps.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "step,loss"
    assert len(lines) == 7


def test_a_run_that_is_resumed_has_every_step_once(tmp_path):
    out = tmp_path / "run"
    module = tiny()
    monitor = cs.CurvatureMonitor(module, PROBE, out=out, **OFF)
    train(monitor, module, range(6))
    del monitor
    again = cs.CurvatureMonitor(tiny(), PROBE, out=out, **OFF)
    train(again, tiny(), range(3, 8))
    again.close()
    assert again.result().steps["step"].tolist() == list(range(8))


def test_training_is_the_same_with_signals():
    def weights(watched):
        torch.manual_seed(0)
        module = tiny()
        monitor = cs.CurvatureMonitor(module, PROBE, **OFF) if watched else None
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for step in range(4):
            loss = F.cross_entropy(module(IDS).flatten(0, 1), TARGETS.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if monitor is not None:
                monitor.step(step, optimizer=optimizer, loss=loss)
        return torch.nn.utils.parameters_to_vector(module.parameters())

    assert torch.equal(weights(True), weights(False))


def test_column_names_are_plain():
    from curvescope.monitor.columns import BLOCK_COLUMNS, COLUMNS

    for name in (*COLUMNS, *BLOCK_COLUMNS):
        assert name.isascii()
        assert name.isidentifier()
