"""What a run says at its end: how far it came, what it skipped and left out, which ceiling it has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from monitor_loops import PROBE, fit, tiny

import curvescope as cs
from commands import call
from curvescope.monitor.messages import Notes
from curvescope.studies import run_study


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Steps of one second, a first measurement of 11: of five that are due one is made, at step 3."""
    now, out = [0.0], tmp_path_factory.mktemp("short") / "run"
    module = tiny()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    monitor = cs.CurvatureMonitor(module, PROBE, every=2, out=out, num_probes=2, clock=lambda: now[0])
    part = monitor._measure_part
    monitor._measure_part = lambda *words: now.__setitem__(0, now[0] + 11.0) or part(*words)

    def loop():
        for step in range(10):
            now[0] += 1.0
            fit(module, optimizer, steps=[step])
            monitor.step(step, optimizer=optimizer)

    with pytest.warns(UserWarning, match="instead of every 2"):
        loop()
    monitor.close()
    return out, monitor


def test_what_was_skipped_is_said(short):
    out, monitor = short
    assert len(monitor.history) == 1
    result = run_study.load(out)[1]
    assert result.end["step"] == 9
    assert result.end["skipped"] == 4
    cost = monitor.history["cost_seconds"][0]
    assert result.end["share"] == pytest.approx(cost / (10 + cost))
    fits = (1.25 * cost * (1 - 0.1) + cost) / 0.1  # where cost and what the next may cost are a tenth
    assert result.end["next_step"] == 9 + int(np.ceil(fits - (10 + cost)))
    assert any(f"at about step {result.end['next_step']:,.0f}" in note for note in result.notes)
    words = {label: f"{value} {words}" for label, value, words in result.summary()}
    assert "4 more that were due were skipped" in words["measurements"]
    assert words["share of the time"].startswith(f"{100 * result.end['share']:.1f} %")


def test_parts_without_a_number_are_left_out(short):
    assert short[1].blocks["lambda_max"].isna().all()
    assert "blocks" in short[1].history["left_out"][0].split()


def test_watch_says_where_a_finished_run_ended(short, capsys):
    out, monitor = short
    _, said, _ = call("watch", out, "--once", capsys=capsys)
    assert "step 9 · finished (1 measurement, the last at step 3, 4 skipped for the budget)" in said
    assert f"1 measurement, {monitor.result().end['share']:.1%} of the time" in said


def test_adam_has_no_ceiling_and_the_page_says_so(short):
    result = short[1].result()
    assert (
        "without a ceiling: the optimizer scales every parameter by itself" in result.captions()["stability"]
    )
    assert "ceiling" not in result.captions()["course"]
    assert result.figures()["stability"].axes[0].get_title(loc="left") == r"$\lambda_{\mathrm{max}}$"


def test_notes_that_differ_in_a_count_are_one_with_their_steps():
    notes = Notes(["first"])
    for step, count in ((0, 186), (50, 11)):
        notes.add(f"Adam: √v is below eps in {count} entries: rounding", step)
        notes.add("another", step)
    assert notes.all() == [
        "first", "Adam: √v is below eps in 186 (step 0), 11 (step 50) entries: rounding", "another",
    ]  # fmt: skip
    for step in (100, 150, 200):
        notes.add(f"Adam: √v is below eps in {step} entries: rounding", step)
    assert "in 186 (step 0) to 200 (step 200), at 5 measurements, entries" in notes.all()[1]
