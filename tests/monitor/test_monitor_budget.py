"""A monitor keeps its share of the time by itself."""

from __future__ import annotations

import pytest
import torch
from monitor_loops import PROBE, fit, tiny

import curvescope as cs
from curvescope.monitor.budget import PATIENCE, Budget
from curvescope.monitor.look import PARTS


class Ticking:
    """A clock by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_affordable_keeps_the_share():
    clock = Ticking()
    budget = Budget(0.1, clock)
    assert budget.affordable(("ends", "trace")) == ("ends", "trace")
    clock.now = 2.0
    budget.note(("ends", "trace"), {"ends": 1.5, "trace": 0.5}, 2.0)
    assert budget.share == 1
    assert budget.affordable(("ends", "trace")) is None
    clock.now = 33.49  # (2 + 1.5) / (33.5 + 1.5) is a tenth
    assert budget.affordable(("ends", "trace")) is None
    clock.now = 33.51
    assert budget.affordable(("ends", "trace")) == ("ends",)
    clock.now = 38.01
    assert budget.affordable(("ends", "trace")) == ("ends", "trace")


def test_parts_take_turns_and_are_waited_for():
    clock = Ticking()
    budget = Budget(0.1, clock)
    costs = {"ends": 1.0, "cheap": 1.0, "other": 1.0, "dear": 30.0}
    due = tuple(costs)
    budget.note(due, costs, 33.0)
    clock.now = 400.0
    seen = []
    for _ in range(400):
        clock.now += 11.0
        parts = budget.affordable(due)
        if parts is not None:
            whole = sum(costs[part] for part in parts)
            clock.now += whole
            budget.note(due, {part: costs[part] for part in parts}, whole)
            seen.append(parts)
            assert budget.share <= 0.1 + 1e-12
    assert {part for parts in seen for part in parts} == set(due)
    gaps = [i for i, parts in enumerate(seen) if "dear" in parts]
    assert max(b - a for a, b in zip([-1, *gaps], gaps, strict=False)) <= PATIENCE + 1


def test_without_a_limit_everything_is_affordable():
    budget = Budget(1.0, Ticking())
    budget.note(("ends",), {"ends": 5.0}, 5.0)
    assert budget.affordable(("ends",)) == ("ends",)


class Counted:
    """A clock that a second passes on whenever somebody looks, so that measuring costs what it looks."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_run_stays_in_its_budget():
    module, clock = tiny(), Counted()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    monitor = cs.CurvatureMonitor(module, PROBE, every=2, budget=0.2, clock=clock)
    for step in range(60):
        clock.now += 8.0
        fit(module, optimizer, steps=[step])
        monitor.step(step, optimizer=optimizer)
    history = monitor.history
    assert history["step"][0] == 0
    assert len(history) > 5
    assert (history["share"][1:] <= 0.2 + 0.02).all()
    assert history["step"].diff().max() > 2  # it waited
    assert (history["left_out"] != "").any()
    for column in ("sharpness", "trace", "ggn_gap"):
        assert history[column].notna().sum() > 1
    assert monitor.blocks["lambda_max"].notna().any()


def test_blocks_take_turns():
    module, clock = tiny(), Counted()
    monitor = cs.CurvatureMonitor(module, PROBE, every=1, budget=0.5, blocks="L0.*", clock=clock)
    for step in range(10):
        clock.now += 7.0
        monitor.step(step)
    seen = monitor.blocks[monitor.blocks["lambda_max"].notna()]
    counts = seen.groupby("block").size()
    names = [name for name in cs.load(module).blocks if name.startswith("L0.")]
    assert set(counts.index) == set(names)
    assert seen.groupby("step").size().max() < len(names)
    assert counts.max() - counts.min() <= 1


def test_what_was_left_out_is_said():
    module, clock = tiny(), Counted()
    monitor = cs.CurvatureMonitor(module, PROBE, every=1, budget=0.5, clock=clock)
    monitor.step(0)
    clock.now += 12.0
    row = monitor.step(1)
    left = monitor.history["left_out"].iloc[-1].split()
    assert left
    assert set(left) <= set(PARTS)
    assert ("trace" in row) == ("trace" not in left)


def test_measure_asks_nobody():
    monitor = cs.CurvatureMonitor(tiny(), PROBE, every=1000, budget=0.001)
    assert monitor.step(7) is None
    assert monitor.measure(8)["step"] == 8
    assert monitor.measure(9)["step"] == 9
    assert monitor.step(1000) is None


@pytest.mark.parametrize("budget", [0, -1, 2, float("nan")])
def test_a_budget_is_a_share(budget):
    with pytest.raises(cs.UsageError, match="budget"):
        cs.CurvatureMonitor(tiny(), PROBE, budget=budget)
