"""What `diagnose` takes an optimizer to see: from a saved state, or from gradients."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diagnose_cases import CFG, problem

import curvescope as cs
from curvescope.studies.diagnose.measurements import adam_sharpness


@pytest.fixture(scope="module")
def healthy() -> cs.Problem:
    return problem()


def test_adam_is_measured_and_its_state_read(healthy: cs.Problem, tmp_path: Path):
    module = copy.deepcopy(healthy.model.module)
    adam = torch.optim.Adam(module.parameters(), lr=3e-4)
    mine = cs.Problem(replace(healthy.model, module=module), healthy.batches)
    squares = mine.space().scatter(mine.gradient().square() + 1e-6)
    for name, p in module.named_parameters():  # as after ten steps that move nothing
        none = torch.zeros_like(p)
        adam.state[p] = {"step": torch.tensor(10.0), "exp_avg": none, "exp_avg_sq": squares[name]}
    torch.save(adam.state_dict(), tmp_path / "optimizer.pt")
    before = [p.detach().clone() for p in healthy.model.module.parameters()]
    found = adam_sharpness(healthy, "adam", str(tmp_path / "optimizer.pt"), CFG.effort)
    right = cs.preconditioned_sharpness(cs.Hessian(mine, engine="autograd"), adam, tol=1e-2)
    assert found.max_learning_rate == pytest.approx(right.max_learning_rate, rel=0.03)
    assert found.learning_rate == pytest.approx(3e-4)
    fresh = adam_sharpness(healthy, "adamw", None, CFG.effort)
    assert any("4 disjoint parts" in word for word in fresh.assumed)
    assert math.isnan(fresh.learning_rate)
    assert all(map(torch.equal, before, healthy.model.module.parameters()))


def test_every_group_of_a_saved_state_has_its_own_rate(healthy: cs.Problem, tmp_path: Path):
    module = copy.deepcopy(healthy.model.module)
    mine = cs.Problem(replace(healthy.model, module=module), healthy.batches)
    own = list(module.parameters())
    groups = [[p for p in own if p.dim() > 1], [p for p in own if p.dim() <= 1]]
    rates = ({"lr": 1e-4, "weight_decay": 0.5}, {"lr": 0.5})
    adam = torch.optim.AdamW([{"params": g, **rate} for g, rate in zip(groups, rates, strict=True)])
    squares = mine.space().scatter(mine.gradient().square() + 1e-6)
    for name, p in module.named_parameters():
        none = torch.zeros_like(p)
        adam.state[p] = {"step": torch.tensor(10.0), "exp_avg": none, "exp_avg_sq": squares[name]}
    torch.save(adam.state_dict(), tmp_path / "optimizer.pt")
    found = adam_sharpness(healthy, "adamw", str(tmp_path / "optimizer.pt"), CFG.effort)
    right = cs.preconditioned_sharpness(cs.Hessian(mine, engine="autograd"), adam, tol=1e-2)
    assert found.ratio == pytest.approx(right.ratio, rel=0.03)
    for group in adam.param_groups:  # a schedule has ended
        group["lr"] = 0.0
    torch.save(adam.state_dict(), tmp_path / "ended.pt")
    ended = adam_sharpness(healthy, "adamw", str(tmp_path / "ended.pt"), CFG.effort, lr=3e-4)
    assert ended.learning_rate == pytest.approx(3e-4)


def test_a_state_of_another_model_is_refused(healthy: cs.Problem, tmp_path: Path):
    torch.save({"weights": 3}, tmp_path / "wrong.pt")
    file = str(tmp_path / "wrong.pt")
    with pytest.raises(cs.UsageError, match="expected the state_dict of an Adam"):
        adam_sharpness(healthy, "adamw", file, CFG.effort)
    other = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(other.parameters())
    other(torch.ones(1, 3)).sum().backward()
    adam.step()
    torch.save(adam.state_dict(), tmp_path / "wrong.pt")
    with pytest.raises(cs.UsageError, match="with the shapes of"):
        adam_sharpness(healthy, "adamw", file, CFG.effort)
