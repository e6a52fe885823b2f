"""The diagnosis of a run: what it finds in histories written by hand, and in real ones."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from monitor_loops import IDS, PROBE, TARGETS, tiny
from torch.nn import functional as F

import curvescope as cs
from curvescope.monitor.diagnosis import RULES, diagnose_run, verdict
from curvescope.monitor.run_history import RunHistory, read_run, stable_rate

MEASURED = np.arange(0, 200, 20.0)
NOISE = np.random.default_rng(0).normal(size=200)


def history(*, losses=None, blocks=None, adam=True, **columns) -> RunHistory:
    """Ten measurements of a healthy run, and the loss of 200 steps, with what is given in their places."""
    falling = 1.5 + 1.3 * np.exp(-np.arange(200) / 40)
    usual = {
        "step": MEASURED,
        "loss": falling[MEASURED.astype(int)],
        "lambda_max": np.full(10, 20.0),
        "lambda_max_error": np.full(10, 0.1),
        "lr": np.full(10, 1e-3),
        "sharpness": np.full(10, 3800.0),
        "sharpness_error": np.full(10, 10.0),
        "sharpness_threshold": np.full(10, 38.0 if adam else 2.0),
        "threshold": np.full(10, math.nan if adam else 2.0),
        "preconditioner_formed": 1 - 0.99 ** (MEASURED + 1) if adam else np.ones(10),
        "uniform_loss": np.full(10, 2.8),
        "weight_norm": np.linspace(10, 11, 10),
        "attention_logit_max": np.linspace(0.1, 2, 10),
        "attention_entropy_min": np.linspace(1, 0.8, 10),
        "moment_resolution": np.full(10, 1e5),
    }
    for name, values in columns.items():
        usual[name] = np.broadcast_to(np.asarray(values, float), (10,)).copy()
    usual["lr_sharpness"] = usual["lr"] * usual["sharpness"]
    usual["lr_lambda_max"] = usual["lr"] * usual["lambda_max"]
    told = falling + 0.03 * NOISE - 0.02 if losses is None else losses
    steps = {"step": np.arange(float(len(told))), "loss": np.asarray(told, float)}
    return RunHistory(usual, blocks or {}, steps)


def ratios(*values: float) -> np.ndarray:
    """Sharpness of an Adam with η = 1e-3 whose ratio to its threshold is this."""
    return 38e3 * np.array(values)


def found(run: RunHistory) -> dict[str, str]:
    return {finding.name: finding.severity for finding in diagnose_run(run)}


def only(run: RunHistory, name: str):
    (finding,) = [one for one in diagnose_run(run) if one.name == name]
    return finding


def with_spikes(*steps: int, height: float = 3.0) -> np.ndarray:
    losses = 1.5 + 1.3 * np.exp(-np.arange(200) / 40) + 0.03 * NOISE - 0.02
    losses[list(steps)] += height
    return losses


def test_a_healthy_run_has_no_finding():
    assert diagnose_run(history()) == []
    assert verdict([]) == "nothing unusual"


def test_a_history_without_optional_columns_has_no_finding():
    run = history()
    few = {name: run.columns[name] for name in ("step", "loss", "lambda_max")}
    assert diagnose_run(RunHistory(few)) == []
    assert diagnose_run(RunHistory({})) == []
    assert stable_rate(RunHistory(few)) is None


RISES = ratios(0.2, 0.5, 1.4, 2.6, 1.8, 1.2, 1.5, 1.1, 1.3, 1.2)
WARMED = np.linspace(2e-4, 1e-3, 10)


def test_a_crossing_is_explained_with_the_spikes_that_follow():
    shares = {
        "step": np.repeat(MEASURED, 2),
        "block": np.array(["L0.W_V", "U"] * 10),
        "sharpness_share": np.array([0.8, 0.2] * 10),
    }
    sharp = RISES * 1e-3 / WARMED
    run = history(sharpness=sharp, lr=WARMED, blocks=shares, losses=with_spikes(52, 91))
    finding = only(run, "learning_rate")
    assert (finding.severity, finding.step, finding.where) == ("fault", 40, "L0.W_V")
    for part in ("at step 40", "52 and 91", "80 %", "learning rate about"):
        assert part in finding.sentence()
    assert "unexplained" not in found(run)


def test_a_rate_that_does_not_rise_lacks_a_warmup():
    run = history(sharpness=RISES, losses=with_spikes(44))
    finding = only(run, "no_warmup")
    assert "200 steps" in finding.remedy  # 2 / (1 − β₂)
    assert "learning_rate" not in found(run)


def test_the_first_steps_of_adam_are_not_counted():
    run = history(sharpness=ratios(700, 0.4, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3))
    assert diagnose_run(run) == []
    assert stable_rate(run).value == pytest.approx(1e-3 / 0.4)
    slow = history(sharpness=ratios(700, 90, *[0.3] * 8), preconditioner_formed=1 - 0.999 ** (MEASURED + 1))
    assert diagnose_run(slow) == []


def test_those_of_gradient_descent_are():
    run = history(
        adam=False, sharpness=np.linspace(4000, 8000, 10), lr=1e-3, losses=with_spikes(3, height=9.0)
    )
    assert found(run)["learning_rate"] == "fault"


def test_one_measurement_above_the_threshold_without_a_sign_is_nothing():
    assert diagnose_run(history(sharpness=ratios(*[0.3] * 6, 3.7, *[0.3] * 3))) == []


def test_a_crossing_within_the_error_is_nothing():
    assert diagnose_run(history(sharpness=ratios(*[1.01] * 10), sharpness_error=2e3)) == []


def test_a_spike_below_the_threshold_is_a_bad_batch():
    run = history(losses=with_spikes(113))
    finding = only(run, "bad_batch")
    assert finding.step == 113
    assert list(found(run)) == ["bad_batch"]


def test_a_loss_that_stays_high_is_not_blamed_on_a_batch():
    losses = with_spikes()
    losses[113:] = 9.0
    assert list(found(history(losses=losses))) == ["unexplained"]


def test_a_diverged_run_without_curvature_is_unexplained():
    losses = np.append(with_spikes()[:90], math.nan)
    finding = only(RunHistory({}, {}, {"step": np.arange(91.0), "loss": losses}), "unexplained")
    assert finding.step == 90


def test_queries_and_keys_that_grow_alone_are_the_cause():
    names = ["L0.W_Q", "L0.W_K", "L0.W_V", "L0.W_1"]
    growth = np.array([np.linspace(1, 20, 10)] * 2 + [np.linspace(1, 1.2, 10)] * 2).T
    blocks = {
        "step": np.repeat(MEASURED, 4),
        "block": np.array(names * 10),
        "weight_norm": growth.ravel(),
    }
    grown = {"attention_logit_max": np.geomspace(0.1, 900, 10), "attention_entropy_min": 0.01}
    run = history(**grown, blocks=blocks, sharpness=RISES)
    assert next(iter(found(run))) == "attention_logits"
    assert found(run) == {"attention_logits": "fault", "no_warmup": "note"}
    everything = {**blocks, "weight_norm": np.repeat(np.linspace(1, 20, 10), 4)}
    assert found(history(**grown, blocks=everything, sharpness=RISES)) == {
        "no_warmup": "fault",
        "attention_logits": "note",
    }


def test_a_first_loss_above_equal_probabilities_is_the_initialization():
    losses = with_spikes()
    losses[:5] += 3
    assert found(history(losses=losses))["initialization"] == "fault"


def test_a_layer_unlike_the_others_is_named():
    names = [f"L{i}.{role}" for i in range(3) for role in ("W_V", "W_O")]
    blocks = {
        "step": np.zeros(6),
        "block": np.array(names),
        "weight_norm": np.array([1.0, 1.1, 9.0, 10.0, 1.05, 0.95]),
    }
    finding = only(history(blocks=blocks), "scaled_layer")
    assert "L1.W_V" in finding.evidence
    assert finding.where.startswith("L1")


def test_a_stack_of_single_layers_need_not_be_alike():
    blocks = {
        "step": np.zeros(6),
        "block": np.array([f"{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")]),
        "weight_norm": np.array([14.0, 0.1, 4.6, 0.1, 1.0, 5.0]),
    }
    assert diagnose_run(history(blocks=blocks)) == []


def test_moments_that_cannot_decay_are_found():
    assert found(history(moment_resolution=0.26)) == {"moment_precision": "warning"}


def test_growing_weights_need_a_rising_probe_loss():
    grown = np.linspace(10, 30, 10)
    assert diagnose_run(history(weight_norm=grown)) == []
    risen = np.concatenate([np.linspace(2.8, 1.8, 4), np.linspace(2.2, 3.5, 6)])
    assert "weight_growth" in found(history(weight_norm=grown, loss=risen))


def test_a_training_loss_above_the_probe_loss_points_to_the_labels():
    losses = with_spikes()
    losses[20:] += 0.6
    assert "label_noise" in found(history(losses=losses))


def test_the_past_does_not_depend_on_the_future():
    run = history(sharpness=RISES, losses=with_spikes(44))
    cut = run.until(60)
    assert cut.at.tolist() == [0, 20, 40, 60]
    assert cut.steps["step"][-1] == 60
    assert {f.name: f.step for f in diagnose_run(cut)} == {f.name: f.step for f in diagnose_run(run)}


def test_the_largest_stable_rate_is_that_of_the_sharpest_measurement():
    run = history(sharpness=ratios(9, 0.5, 0.8, 0.4, *[0.3] * 6), sharpness_error=300.0)
    rate = stable_rate(run)
    assert (rate.step, rate.num_measurements) == (40, 9)
    assert rate.value == pytest.approx(38 / 30400)
    assert rate.low == pytest.approx(38 / 30700)
    assert rate.high == pytest.approx(38 / 30100)
    assert stable_rate(run, last=True).value == pytest.approx(38 / 11400)


def test_findings_cannot_be_changed():
    finding = diagnose_run(history(moment_resolution=0.26))[0]
    with pytest.raises(FrozenInstanceError):
        finding.step = 3


def test_every_rule_has_a_reason():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.reason and rule.unit and math.isfinite(rule.limit) for rule in RULES)
    named = {rule.name for rule in RULES}
    assert all(set(rule.explains) <= named for rule in RULES)


def test_a_hundred_thousand_steps_take_no_time():
    import time

    losses = 2 + 0.1 * np.random.default_rng(1).normal(size=100_000)
    losses[70_000] = 30
    run = RunHistory({}, {}, {"step": np.arange(100_000.0), "loss": losses})
    begun = time.process_time()
    assert "unexplained" in found(run) or "bad_batch" in found(run)
    assert time.process_time() - begun < 5


# ---------------------------------------------------------------------------------------------- real runs


def descend(out, lr, steps=13, **settings):
    """Gradient descent on all the data, with a monitor."""
    module = tiny()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    with cs.CurvatureMonitor(
        module, PROBE, every=1, budget=1.0, blocks=False, num_probes=2, out=out, **settings
    ) as monitor:
        for step in range(steps):
            loss = F.cross_entropy(module(IDS).flatten(0, 1), TARGETS.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(step, optimizer=optimizer, loss=loss)
    return monitor


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {lr: (root / f"{lr:g}", descend(root / f"{lr:g}", lr)) for lr in (0.01, 1.0)}


def test_gradient_descent_at_too_large_a_rate_is_explained(runs):
    folder, monitor = runs[1.0]
    assert "learning_rate" in {finding.name for finding in monitor.findings}
    assert [f.name for f in diagnose_run(read_run(folder))] == [f.name for f in monitor.findings]
    assert monitor.result().findings[0].name == monitor.findings[0].name


def test_at_a_small_rate_nothing_is_found(runs):
    assert runs[0.01][1].findings == []


def test_the_largest_rate_is_threshold_over_sharpness(runs):
    monitor = runs[0.01][1]
    last = monitor.history.iloc[-1]
    rate = monitor.max_learning_rate
    assert rate.value == pytest.approx(2 / last["lambda_max"])
    assert rate.low < rate.value < rate.high


def test_no_rate_before_the_first_measurement():
    assert cs.CurvatureMonitor(tiny(), PROBE).max_learning_rate is None


def regress(seed, rate, *, momentum, steps=150, out=None):
    """Losses of a linear regression by gradient descent, and its monitor if it has a folder."""
    source = torch.Generator().manual_seed(seed)
    X = torch.randn(20, 4, generator=source, dtype=torch.float64) * torch.tensor([3.0, 1.0, 1.0, 0.5])
    Y = X @ torch.randn(4, 1, generator=source, dtype=torch.float64)
    net = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum)
    monitor = None
    if out is not None:
        monitor = cs.CurvatureMonitor(
            net, [(X, Y)], F.mse_loss, every=50, budget=1.0, blocks=False, num_probes=2, out=out
        )
    losses = []
    for step in range(steps):
        loss = F.mse_loss(net(X), Y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if monitor is not None:
            monitor.step(step, optimizer=optimizer, loss=loss)
    return losses, monitor


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(10))
def test_the_largest_stable_rate_separates_stable_from_unstable(seed, momentum, tmp_path):
    monitor = regress(seed, 1e-3, momentum=momentum, out=tmp_path / "run")[1]
    rate = stable_rate(read_run(tmp_path / "run"))
    assert rate.value == pytest.approx(monitor.max_learning_rate.value, rel=0.05)
    below = regress(seed, 0.8 * rate.value, momentum=momentum)[0]
    above = regress(seed, 1.25 * rate.value, momentum=momentum)[0]
    assert below[-1] < below[0]
    assert above[-1] > 1e3 * above[0]
