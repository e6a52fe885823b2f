"""A monitor keeps its share of the time by itself."""

from __future__ import annotations

import math

import pytest
import torch
from monitor_loops import PROBE, fit, seed_everything, tiny

import curvescope as cs
from curvescope.algorithms.spectra.subspace_tracking import Subspace
from curvescope.monitor.budget import DEBT_STEPS, MARGIN, PACE_STEPS, Budget
from curvescope.monitor.measurement import PARTS, Measurement


class Ticking:
    """A clock by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


USUAL = {"top": 4.0, "cheap": 1.0, "other": 1.0, "dear": 30.0}


def timed(limit=0.1, step_seconds=1.0):
    """A budget that has timed enough steps of training for a first measurement."""
    clock = Ticking()
    budget = Budget(limit, clock)
    for _ in range(PACE_STEPS):
        clock.now += step_seconds
        budget.note_training(1, step_seconds)
    return budget, clock


def test_the_first_measurement_waits_until_steps_are_timed():
    budget = Budget(0.1, Ticking())
    assert budget.affordable(("top",), USUAL) is None
    assert timed()[0].affordable(("top",), USUAL) == ("top",)


def test_the_first_measurement_may_take_what_a_hundred_steps_make_up():
    budget, clock = timed()
    cost = budget.allowance()
    clock.now += cost
    budget.note({"top": cost}, cost, cost / 4)
    assert budget.share > 0.5
    clock.now += DEBT_STEPS * 1.0
    assert budget.share == pytest.approx(0.1)


def test_a_dear_first_measurement_waits_for_its_share():
    budget, clock = timed()
    budget.product_seconds = 100.0
    assert budget.affordable(("top",), USUAL) is None
    while (parts := budget.affordable(("top",), USUAL)) is None:
        clock.now += 1.0
    assert parts == ("top",)
    assert budget.upper("top", USUAL) <= budget.allowance()


def test_what_is_affordable_keeps_the_share():
    budget, clock = timed()
    clock.now += 2.0
    budget.note({"top": 2.0}, 2.0, 0.5)
    cost = MARGIN * 2.0
    clock.now = (2.0 + (1 - 0.1) * cost) / 0.1 - 0.01  # where (2 + c) / (t + c) is a tenth
    assert budget.affordable(("top",), USUAL) is None
    clock.now += 0.02
    assert budget.affordable(("top",), USUAL) == ("top",)


def test_what_is_not_known_costs_its_usual_products():
    budget, _ = timed()
    budget.note({"top": 8.0}, 8.0, 2.0)
    assert budget.upper("dear", USUAL) == pytest.approx(MARGIN * 30 * 2)
    for cost in (3.0, 1.0, 2.0):
        budget.note({"dear": cost}, cost)
    assert budget.upper("dear", USUAL) == MARGIN * 3
    budget.note({"dear": 1.0}, 1.0)
    assert budget.upper("dear", USUAL) == MARGIN * 2


def test_every_part_gets_its_turn_and_the_first_one_most_often():
    budget, clock = timed()
    costs = {"top": 4.0, "cheap": 1.0, "other": 1.0, "dear": 30.0}
    budget.note({"top": 4.0}, 4.0, 1.0)
    seen = []
    for _ in range(4000):
        clock.now += 10.0
        budget.note_training(10, 10.0)
        parts = budget.affordable(tuple(costs), USUAL, every=10)
        if parts is not None:
            whole = sum(costs[part] for part in parts)
            clock.now += whole
            budget.note({part: costs[part] for part in parts}, whole, 1.0)
            seen.append(parts)
            assert budget.share <= 0.1 + 1e-12
    counts = {part: sum(part in parts for parts in seen) for part in costs}
    assert counts["top"] == len(seen)
    assert counts["cheap"] > counts["dear"] >= 5
    assert sum(budget.used.values()) / clock.now > 0.09  # nothing is left unused


def test_without_a_limit_everything_is_affordable():
    budget = Budget(1.0, Ticking())
    budget.note({"top": 5.0}, 5.0)
    assert budget.affordable(("top", "dear"), USUAL) == ("top", "dear")


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
    monkeypatch.setattr(Measurement, "verify", lambda measurement: None)
    return clock


def run(clock, *, steps, price_at=None, dear=3.0, **options):
    """A monitor behind steps of ten seconds; the price of a product rises to `dear` at a step."""
    seed_everything()
    module = tiny()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    monitor = cs.CurvatureMonitor(module, PROBE, clock=clock, num_probes=2, **options)
    for step in range(steps):
        clock.now += 10.0
        clock.price = dear if price_at is not None and step >= price_at else 1.0
        fit(module, optimizer, steps=[step])
        monitor.step(step, optimizer=optimizer)
    return monitor


def test_a_run_stays_in_its_budget(priced):
    monitor = run(priced, steps=60, every=3, budget=0.4, blocks="L0.W_Q")
    history = monitor.history
    assert history["step"][0] == PACE_STEPS
    assert history["products"][0] <= 20
    assert len(history) > 8
    over = (history["share"] - 0.4) * history["seconds"]
    assert (over[1:] <= 2.0).all()  # at most the products that a search begins with
    assert history["lambda_max"].notna().all()
    assert history["sharpness"].notna().all()
    assert (history["left_out"] != "").any()
    for column in ("curvature_along_update", "lambda_min", "trace", "ggn_gap"):
        assert history[column].notna().any()
    assert monitor.blocks["lambda_max"].notna().any()


def test_what_suddenly_costs_more_is_stopped_and_waited_for(priced):
    history = run(priced, steps=60, price_at=30, every=3, budget=0.2, blocks=False).history
    late = history[history["step"] >= 30]
    assert len(late) > 1
    over = late["share"] * late["seconds"] - 0.2 * late["seconds"]
    assert over.max() <= 2 * 3.0  # one piece: the products that a search begins with
    begun = late["seconds"] - late["cost_seconds"]
    before = late["share"] * late["seconds"] - late["cost_seconds"]
    assert (before <= 0.2 * begun + 1e-9).all()  # what was over is waited for before the next begins


def test_a_search_ends_in_time_with_what_it_has(priced):
    monitor = run(priced, steps=90, every=2, price_at=12, dear=8.0, budget=0.1, blocks=False, tol=1e-3)
    history = monitor.history
    dear = history[history["step"] >= 12]
    assert len(dear)
    assert (dear["products"] < history["products"][0]).all()
    assert (dear["converged"] == 0).all()
    assert ((dear["share"] - 0.1) * dear["seconds"] <= 2 * 8.0).all()  # a product of each search


def test_blocks_take_turns(priced):
    monitor = run(priced, steps=24, every=1, budget=0.9, blocks="L0.W_[QK]")
    seen = monitor.blocks[monitor.blocks["lambda_max"].notna()]
    counts = seen.groupby("block").size()
    assert set(counts.index) == {"L0.W_Q", "L0.W_K"}
    assert counts.max() - counts.min() <= 1


def test_what_was_left_out_is_said(priced):
    monitor = run(priced, steps=40, every=1, budget=0.5, blocks=False)
    for _, row in monitor.history.iterrows():
        left = row["left_out"].split()
        assert set(left) <= set(PARTS)
        assert math.isnan(row["trace"]) == ("trace" in left)
    assert (monitor.history["left_out"] != "").any()


def test_a_row_says_whether_its_errors_reach_up_to_a_bound(priced):
    history = run(priced, steps=60, every=1, budget=0.4, blocks=False).history
    assert history["bounded"][0] == 1
    assert set(history["bounded"]) == {0.0, 1.0}
    left_out = history["left_out"].str.split().map(lambda parts: "bound" in parts)
    assert (left_out == (history["bounded"] == 0)).all()
    assert (history["lambda_max_error"] > 0).all()


def test_measure_asks_nobody():
    monitor = cs.CurvatureMonitor(tiny(), PROBE, every=1000, budget=0.001, blocks=False)
    assert monitor.step(7) is None
    assert monitor.measure(8)["step"] == 8
    assert monitor.measure(9)["step"] == 9
    assert monitor.step(1000) is None


def test_what_the_budget_skips_is_said_behind_the_first_measurement(priced):
    with pytest.warns(UserWarning, match="at about step [0-9]+"):
        monitor = run(priced, steps=12, every=1, budget=0.05, blocks=False)
    assert len(monitor.history) == 1
    assert sum("at about step" in note for note in monitor.notes) == 1


@pytest.mark.parametrize("budget", [0, -1, 2, float("nan")])
def test_a_budget_is_a_share(budget):
    with pytest.raises(cs.UsageError, match="budget"):
        cs.CurvatureMonitor(tiny(), PROBE, budget=budget)
