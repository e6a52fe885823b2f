"""The study `causal`: predictions meet what is found for small steps, and parts add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import curvescope as cs
from commands import call
from curvescope.geometry.causal.decoded import direct_change, layer_directions
from curvescope.studies import causal, find
from curvescope.studies.causal.study import agreement, measure_layer, measure_parts
from oracles import transformer
from selection import some

SMALL = {"tokens": 24, "seq_len": 12, "layers": (3,), "alphas": (-0.1, 0.1)}


def problem(**settings: Any) -> cs.Problem:
    ids = torch.randint(0, 5, (3, 5), generator=torch.Generator().manual_seed(0))
    return cs.Problem(transformer(n_layers=2, **settings), (ids[:, :-1], ids[:, 1:]))


@pytest.mark.parametrize("layer", some([1, 0], 1))
def test_predictions_are_right_to_their_order(layer: int):
    found = measure_layer(problem(), layer, num=1, k=2, alphas=[1e-3, 2e-3])
    gap1 = np.abs(found.predicted(1) - found.loss_change)[:, :2]
    gap2 = np.abs(found.predicted(2) - found.loss_change)[:, :2]
    assert np.median(gap1[:, 1] / gap1[:, 0]) == pytest.approx(4, rel=0.1)
    assert np.median(gap2[:, 1] / gap2[:, 0]) == pytest.approx(8, rel=0.2)
    assert (gap2 < 1e-3 * np.abs(found.loss_change[:, :2]) + 1e-7).all()
    assert found.names[0] == f"L{layer}.h0.vo.0"


def test_ablation_is_predicted_along_what_it_takes_out():
    case = problem()
    found = measure_layer(case, 1, num=1, k=1, alphas=[1.0])
    direction = layer_directions(case.model, 1)[0]
    x = case.activations(case.batches[0], direction.at)[direction.at]
    step = -(x @ direction.vector)[..., None] * direction.vector
    H = cs.ActivationHessian(case, direction.at)
    assert found.slope[0, 1] == pytest.approx(float(H.gradient() @ step.flatten()), abs=1e-10)
    assert found.bend[0, 1] == pytest.approx(float(step.flatten() @ (H @ step.flatten())), abs=1e-10)
    truth = cs.geometry.ablate(case, direction.at, direction.vector).loss_change[0]
    assert found.loss_change[0, -1] == pytest.approx(truth, abs=1e-12)


def test_the_direct_path_is_the_whole_one_behind_the_last_layer():
    case = problem(norm="none")
    u = torch.randn(1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.tensor([[0, 3]])
    for at in ("L1.out", "final"):
        effect = cs.geometry.steer(case, at, u[0], [1.0], watch=[0, 3])
        np.testing.assert_allclose(direct_change(case, at, u, ids), effect.logit_change, atol=1e-10)
    case = problem()
    small = cs.geometry.steer(case, "final", u[0], [1.0], watch=[0, 3])
    np.testing.assert_allclose(direct_change(case, "final", u, ids), small.logit_change, atol=1e-10)


def test_parts_add_up_to_the_mean_logit():
    case = problem()
    found = measure_parts(case)
    z = case.model.evaluate(case.batches[0].inputs)
    z = z - z.mean(-1, keepdim=True)
    own = z.gather(-1, case.batches[0].targets[..., None])
    assert found.mean.sum() == pytest.approx(float(own.mean()), abs=1e-10)
    assert found.logit == pytest.approx(float(own.mean()), abs=1e-10)
    assert found.error < 1e-10
    assert "Transformer" in measure_parts(problem(norm="post")).note


def test_what_is_shown(tmp_path: Path):
    state: dict[str, Any] = {}
    result = causal.run(causal.Config(**SMALL), state=state)
    tables, figures = result.tables(), result.figures()
    assert set(tables) | set(figures) == set(result.captions())
    assert len(tables["directions"]) == 14 * 3
    assert tables["attribution"]["mean"].sum() == pytest.approx(result.parts.logit, rel=1e-4)
    assert list(state) == ["contents", "attribution", "directions of L3"]
    assert causal.Causal.load(result.save(tmp_path)).layers[0].names == result.layers[0].names
    r = agreement(result.predicted(2)[:, :-1], result.stacked("loss_change")[:, :-1])
    assert r > 0.99
    assert find("causal").Config is causal.Config


def test_the_command_line(tmp_path: Path, undrawn: None, capsys: Any):
    settings = ["--set=tokens=24", "--set=seq_len=12", "--set=layers=3", "--set=alphas=0.5,1"]
    code, _, _ = call("run", "causal", *settings, "--out", tmp_path, "--quiet", capsys=capsys)
    assert code == 0
    (folder,) = (tmp_path / "causal").iterdir()
    assert (folder / "tables" / "directions.csv").exists()
    assert (folder / "tables" / "attribution.csv").exists()


@pytest.mark.parametrize("alphas", [(), (0.0,), (float("inf"),)])
def test_strengths_that_are_none(alphas: tuple[float, ...]):
    with pytest.raises(cs.UsageError, match="alphas"):
        causal.Config(alphas=alphas)
