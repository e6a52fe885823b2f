"""The numbers of a monitor along a training run, next to dense matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from monitor_loops import PROBE, fit, seed_everything, tiny

import curvescope as cs
from curvescope.algorithms.columns import mean_and_stderr
from curvescope.algorithms.estimates.intervals import mean_interval
from curvescope.algorithms.spectra.subspace_tracking import Outside, follow_ends
from curvescope.core.seeds import probes
from curvescope.monitor.measurement import gap_interval
from curvescope.sampling import eigenvalue_error


class Dense:
    """The truth at one step."""

    def __init__(self, module, optimizer):
        problem = cs.Problem(module, PROBE)
        self.H, self.G = cs.Hessian(problem).to_dense(), cs.GGN(problem).to_dense()
        self.values, self.vectors = torch.linalg.eigh(self.H)
        self.top = eigenvalue_error(cs.Hessian(problem), self.vectors[:, -1], value=float(self.values[-1]))
        self.g, self.loss = problem.gradient(), problem.loss_value()
        self.slices = problem.space().slices
        self.sharpness = cs.preconditioned_sharpness(cs.Hessian(problem), optimizer)


@pytest.fixture(scope="module")
def run():
    """A run with every number at three steps, and the truth there."""
    module = tiny()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    monitor = cs.CurvatureMonitor(module, PROBE, every=4, budget=1.0, num_probes=32, blocks="L0.W_[QV]")
    truths, rows = [], []
    seed_everything()
    for step in range(9):
        fit(module, optimizer, steps=[step])
        if step % 4 == 0:
            truths.append(Dense(module, optimizer))
            rows.append(monitor.step(step, optimizer=optimizer))
    return monitor, rows, truths


def test_ends_are_within_a_percent_and_within_their_errors(run):
    for row, truth in zip(run[1], run[2], strict=True):
        top, bottom = float(truth.values[-1]), float(truth.values[0])
        assert row["converged"] == 1
        assert abs(row["lambda_max"] - top) <= 0.01 * top
        assert abs(row["lambda_max"] - top) <= row["lambda_max_error"] + 1e-9
        assert abs(row["lambda_min"] - bottom) <= max(row["lambda_min_error"], 0.02 * top)


def test_sampling_errors_are_those_of_the_eigenvectors_over_groups_of_probe_sequences(run):
    for row, truth in zip(run[1], run[2], strict=True):
        assert truth.top.num_groups == 3
        assert row["lambda_max_sampling"] == pytest.approx(truth.top.sampling, rel=0.05)
        assert row["sharpness_sampling"] > 0


def test_loss_and_gradient(run):
    for row, truth in zip(run[1], run[2], strict=True):
        assert row["loss"] == pytest.approx(truth.loss, rel=1e-12)
        assert row["grad_norm"] == pytest.approx(float(truth.g.norm()), rel=1e-9)
        along = float(truth.g @ truth.H @ truth.g / truth.g.square().sum())
        assert row["curvature_along_gradient"] == pytest.approx(along, rel=1e-9)
        share = float((truth.vectors[:, -3:].T @ truth.g).square().sum() / truth.g.square().sum())
        sine = row["eigenspace_error"]
        assert abs(row["grad_share"] - share) <= 2 * sine * math.sqrt(share * (1 - share)) + sine**2
        assert abs(row["grad_share"] - share) < 0.1


def test_traces_are_within_their_errors(run):
    monitor, rows, truths = run
    misses = []
    for row, truth in zip(rows, truths, strict=True):
        misses.append((row["trace"] - float(truth.H.diagonal().sum())) / row["trace_stderr"])
        blocks = monitor.blocks[monitor.blocks["step"] == row["step"]].set_index("block")
        for name, rows_ in truth.slices.items():
            miss = blocks.loc[name, "trace"] - float(truth.H.diagonal()[rows_].sum())
            misses.append(miss / max(blocks.loc[name, "trace_stderr"], 1e-12))
        assert blocks["trace"].sum() == pytest.approx(row["trace"], rel=1e-9)
    assert np.abs(misses).max() < 6
    assert np.sqrt(np.mean(np.square(misses))) < 1.6


def test_the_ggn_and_its_gap(run):
    for row, truth in zip(run[1], run[2], strict=True):
        top = float(torch.linalg.eigvalsh(truth.G)[-1])
        assert row["ggn_lambda_max"] == pytest.approx(top, rel=0.01)
        gap = float((truth.H - truth.G).norm() / truth.H.norm())
        assert abs(row["ggn_gap"] - gap) < 4 * row["ggn_gap_stderr"]


@pytest.mark.parametrize("trained", [40, 200])
def test_intervals_of_eight_probes_hold(trained):
    """Outliers dominate the Hessian of a trained model: few probes see them differently."""
    module = tiny()
    fit(module, torch.optim.Adam(module.parameters(), lr=0.02), steps=range(trained))
    problem = cs.Problem(module, PROBE)
    H, G = cs.Hessian(problem), cs.GGN(problem).to_dense()
    subspace = follow_ends(H, None, problem.gradient()[None], top=3).subspace
    H = H.to_dense()
    trace, gap = float(H.trace()), float((H - G).norm() / H.norm())
    held = []
    for seed in range(600):
        X = probes(len(H), 8, seed=seed, dtype=H.dtype)
        exact, samples = Outside(subspace).block_samples(X, H @ X, [slice(None)])
        mean, stderr = mean_and_stderr((exact + samples)[:, 0])
        low, high = mean_interval(mean, stderr, 7)
        gap_low, gap_high = gap_interval((H - G) @ X, H @ X)
        held.append((low <= trace <= high, gap_low <= gap <= gap_high))
    assert (np.mean(held, axis=0) >= 0.92).all()


def test_what_adam_sees(run):
    for row, truth in zip(run[1], run[2], strict=True):
        assert row["sharpness"] == pytest.approx(truth.sharpness.value, rel=0.01)
        assert row["lr_sharpness"] == pytest.approx(0.02 * row["sharpness"])
        assert row["sharpness_threshold"] == pytest.approx(2 * 1.9 / 0.1)
        ratio = row["lr_sharpness"] / row["sharpness_threshold"]
        assert ratio == pytest.approx(truth.sharpness.ratio, rel=0.01)


def test_blocks_are_those_of_the_hessian(run):
    monitor, rows, truths = run
    for row, truth in zip(rows, truths, strict=True):
        blocks = monitor.blocks[monitor.blocks["step"] == row["step"]].set_index("block")
        assert set(blocks.index[blocks["lambda_max"].notna()]) == {"L0.W_Q", "L0.W_V"}
        for name in ("L0.W_Q", "L0.W_V"):
            part = truth.slices[name]
            top = float(torch.linalg.eigvalsh(truth.H[part, part])[-1])
            assert blocks.loc[name, "lambda_max"] == pytest.approx(top, rel=0.02, abs=1e-6)


def test_overlap_is_that_of_eigenspaces(run):
    rows, truths = run[1], run[2]
    assert math.isnan(run[0].history["overlap"][0])
    for row, before, now in zip(rows[1:], truths, truths[1:], strict=False):
        expected = float((before.vectors[:, -3:].T @ now.vectors[:, -3:]).square().sum()) / 3
        assert 0 <= row["overlap"] <= 1
        assert row["overlap"] == pytest.approx(expected, abs=0.1)


def test_a_later_measurement_takes_fewer_products(run):
    products = run[0].history["products"]
    assert run[0].history["verified"][0] == 1
    assert products[1:].max() < products[0]


OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), 2.0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 3.8),
    "Nesterov": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), 3.8 / 2.8),
    "decay": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), 2.0),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9)), 3.6 / 0.2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_thresholds_are_those_of_the_optimizer(name):
    module = tiny()
    make, threshold = OPTIMIZERS[name]
    optimizer = make(module.parameters())
    fit(module, optimizer, steps=range(3))
    monitor = cs.CurvatureMonitor(module, PROBE, blocks=False, budget=1.0, num_probes=2)
    row = monitor.step(0, optimizer=optimizer)
    expected = cs.preconditioned_sharpness(cs.Hessian(cs.Problem(module, PROBE)), optimizer)
    assert row["sharpness_threshold"] == pytest.approx(threshold)
    assert row.get("threshold") == (None if name == "Adam" else pytest.approx(threshold))
    assert row["sharpness"] == pytest.approx(expected.value, rel=0.01)
    assert row["lr_lambda_max"] == pytest.approx(row["lr"] * row["lambda_max"])
