"""A monitor keeps its share of the time by itself."""

from __future__ import annotations

import math

import pytest
import torch
from monitor_loops import PROBE, fit, seed_everything, tiny

import curvescope as cs
from curvescope.algorithms.spectra.following import Subspace
from curvescope.monitor.budget import MARGIN, PATIENCE, Budget
from curvescope.monitor.look import PARTS, Look


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
    ends, trace = MARGIN * 1.5, MARGIN * 0.5  # with (2 + c) / (t + c) a tenth, t = 20 + 9 c
    clock.now = 20 + 9 * ends - 0.01
    assert budget.affordable(("ends", "trace")) is None
    clock.now += 0.02
    assert budget.affordable(("ends", "trace")) == ("ends",)
    clock.now += 9 * trace
    assert budget.affordable(("ends", "trace")) == ("ends", "trace")


def test_what_is_not_known_may_cost_what_the_dearest_does():
    budget = Budget(0.1, Ticking())
    budget.note(("ends", "trace"), {"ends": 1.0, "trace": 4.0}, 5.0)
    assert budget.upper("blocks") == budget.upper("trace") == MARGIN * 4
    for cost in (3.0, 1.0, 2.0):
        budget.note(("blocks",), {"blocks": cost}, cost)
    assert budget.upper("blocks") == MARGIN * 3
    budget.note(("blocks",), {"blocks": 1.0}, 1.0)
    assert budget.upper("blocks") == MARGIN * 2


def test_parts_take_turns_and_are_waited_for():
    clock = Ticking()
    budget = Budget(0.1, clock)
    costs = {"ends": 1.0, "cheap": 1.0, "other": 1.0, "dear": 30.0}
    due = tuple(costs)
    budget.note(due, costs, 33.0)
    clock.now = 450.0
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


@pytest.fixture
def priced(monkeypatch):
    """A clock that goes on with the products of searches alone, `price` seconds each."""
    clock, add = Ticking(), Subspace.add
    clock.price = 1.0

    def paid(subspace, rows):
        count = add(subspace, rows)
        clock.now += clock.price * count
        return count

    monkeypatch.setattr(Subspace, "add", paid)
    monkeypatch.setattr(Look, "verify", lambda look: None)
    return clock


def run(clock, *, steps, price_at=None, **options):
    """A monitor behind steps of ten seconds; the price of a product triples at a step."""
    seed_everything()
    module = tiny()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    monitor = cs.CurvatureMonitor(module, PROBE, clock=clock, num_probes=2, **options)
    for step in range(steps):
        clock.now += 10.0
        clock.price = 3.0 if price_at is not None and step >= price_at else 1.0
        fit(module, optimizer, steps=[step])
        monitor.step(step, optimizer=optimizer)
    return monitor


def test_a_run_stays_in_its_budget(priced):
    monitor = run(priced, steps=44, every=2, budget=0.2, blocks="L0.W_Q")
    history = monitor.history
    assert history["step"][0] == 0
    assert len(history) > 3
    over = (history["share"] - 0.2) * history["seconds"]
    assert (over[1:] <= 2.0).all()  # at most the products that a search begins with
    assert history["step"].diff().max() > 2  # it waited
    assert (history["left_out"] != "").any()
    for column in ("sharpness", "trace", "ggn_gap"):
        assert history[column].notna().sum() > 1
    assert monitor.blocks["lambda_max"].notna().any()


def test_what_suddenly_costs_more_is_stopped_and_waited_for(priced):
    history = run(priced, steps=80, price_at=30, every=2, budget=0.2, blocks=False).history
    late = history[history["step"] >= 30]
    assert len(late) > 1
    over = late["share"] * late["seconds"] - 0.2 * late["seconds"]
    assert over.max() <= 2 * 3.0  # one piece: the products that a search begins with
    begun = late["seconds"] - late["cost_seconds"]
    before = late["share"] * late["seconds"] - late["cost_seconds"]
    assert (before <= 0.2 * begun + 1e-9).all()  # what was over is waited for before the next begins


def test_a_search_ends_in_time_with_what_it_has(priced):
    module = tiny()
    monitor = cs.CurvatureMonitor(module, PROBE, every=1, budget=0.2, blocks=False, clock=priced, tol=1e-3)
    monitor.step(0)
    priced.now = 5 * monitor.history["cost_seconds"][0] + 1.25 * 5 * 16
    priced.price = 8.0
    row = monitor.step(1)
    assert row["converged"] == 0
    assert row["lambda_min_error"] > 1e-3 * row["lambda_max"]
    assert monitor.history["left_out"].iloc[-1]


def test_blocks_take_turns(priced):
    monitor = run(priced, steps=12, every=1, budget=0.6, blocks="L0.W_[QK]")
    seen = monitor.blocks[monitor.blocks["lambda_max"].notna()]
    counts = seen.groupby("block").size()
    assert set(counts.index) == {"L0.W_Q", "L0.W_K"}
    assert counts.max() - counts.min() <= 1


def test_what_was_left_out_is_said(priced):
    monitor = run(priced, steps=8, every=1, budget=0.5, blocks=False)
    for _, row in monitor.history.iterrows():
        left = row["left_out"].split()
        assert set(left) <= set(PARTS)
        assert math.isnan(row["sharpness"]) == ("sharpness" in left)
    assert (monitor.history["left_out"] != "").any()


def test_measure_asks_nobody():
    monitor = cs.CurvatureMonitor(tiny(), PROBE, every=1000, budget=0.001, blocks=False)
    assert monitor.step(7) is None
    assert monitor.measure(8)["step"] == 8
    assert monitor.measure(9)["step"] == 9
    assert monitor.step(1000) is None


@pytest.mark.parametrize("budget", [0, -1, 2, float("nan")])
def test_a_budget_is_a_share(budget):
    with pytest.raises(cs.UsageError, match="budget"):
        cs.CurvatureMonitor(tiny(), PROBE, budget=budget)
