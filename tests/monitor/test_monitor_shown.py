"""A watched run as a result: words, tables, figures, a run folder, a page."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from monitor_loops import PROBE, fit, tiny

import curvescope as cs
from curvescope.monitor import Monitored
from curvescope.report import write_page
from curvescope.runs.listing import list_runs
from curvescope.studies import run_study
from scenes import checked


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "mine"
    module = tiny()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    with cs.CurvatureMonitor(
        module, PROBE, every=4, budget=1.0, out=out, blocks="L0.W_Q", num_probes=2
    ) as monitor:
        fit(module, optimizer, monitor, steps=range(5))
    return out, monitor


def test_the_folder_is_a_finished_run(finished):
    out, monitor = finished
    config, result = run_study.load(out)
    assert config["study"] == "monitor"
    assert isinstance(result, Monitored)
    np.testing.assert_array_equal(result.history["lambda_max"], monitor.history["lambda_max"])
    (run,) = list_runs(out.parent, depth=1)
    assert run.finished
    assert run.study == "monitor"
    assert {path.stem for path in (out / "figures").glob("*.png")} == set(result.figures())


def test_everything_that_is_shown_has_words(finished):
    result = finished[1].result()
    named = {*result.figures(), *result.tables()}
    assert named <= set(result.captions())
    course = checked(result)["course"]["variants"]["λ_max"]["data"]
    line = next(one for one in course if one["name"] == "λ<sub>max</sub>")
    known = result.history["lambda_max"]
    np.testing.assert_allclose(line["y"], known[np.isfinite(known)], rtol=1e-5)
    labels = [label for label, _, _ in result.summary()]
    assert labels[0] == "measurements"
    assert "λ_max" in labels
    assert "η · sharpness / threshold" in labels


def test_the_page_shows_it(finished):
    page = write_page([finished[0]], finished[0].parent / "page.html").read_text(encoding="utf-8")
    assert "curvature of a model during training" in page
    assert "blocks_lambda_max" in page or "λ_max of every block" in page


def test_a_map_of_blocks_keeps_what_was_seen_last():
    nan = np.nan
    blocks = {
        "step": np.array([0.0, 0.0, 2.0, 2.0, 4.0]),
        "block": np.array(["a", "b", "a", "b", "b"]),
        "lambda_max": np.array([1.0, nan, nan, 3.0, 5.0]),
    }
    history = {"step": np.array([0.0, 2.0, 4.0])}
    result = Monitored("m", "d", "l", 1.0, 1, 1, 0.1, history, blocks, [""] * 3)
    names, steps, values = result.block_map("lambda_max")
    assert names == ["a", "b"]
    assert steps.tolist() == [0, 2, 4]
    np.testing.assert_array_equal(values, [[1, 1, 1], [nan, 3, 5]])


def test_nothing_measured_can_be_shown(tmp_path):
    monitor = cs.CurvatureMonitor(tiny(), PROBE, out=tmp_path / "run")
    monitor.close()
    result = run_study.load(tmp_path / "run")[1]
    assert result.summary() == [("measurements", "0", "nothing was measured")]
    assert result.figures() == {}
    assert result.scenes() == {}
