"""docs/dynamics.md: its code runs, and its tables are what the stored result gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dynamics_results
from curvescope.studies.dynamics import EXPERIMENTS, Config
from curvescope.studies.dynamics.analysis import SIGNALS

PAGE = (Path(__file__).parent.parent / "docs" / "dynamics.md").read_text(encoding="utf-8")


def test_the_examples_run():
    space: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(code, "docs/dynamics.md", "exec"), space)
    course = space["course"]
    assert len(course.loss) == 9
    assert course.loss[-1] < course.loss[0]
    assert course.column("lr_lambda_max") == pytest.approx(0.2 * course.column("lambda_max"))


@pytest.mark.parametrize("name", ["claims", "alarms"])
def test_the_tables_are_those_of_the_stored_result(name: str):
    result = dynamics_results.load()
    assert dynamics_results.marked(name, dynamics_results.parts(result)[name]) in PAGE


def test_the_stored_result_is_of_the_settings_of_the_study():
    result, cfg = dynamics_results.load(), Config()
    assert result.experiments == list(EXPERIMENTS)
    assert len(result.of("edge")) == len(cfg.edges)
    assert len(result.of("spikes")) == 2 * cfg.num_seeds
    assert all(len(run.loss) == cfg.steps + 1 for run in result.of("edge"))
    assert result.of("adam")[0].lr[-1] == cfg.adam_lr
    assert all(run.lr[-1] == cfg.grok_lr and len(run.lr) == cfg.grok_steps for run in result.of("grokking"))
    assert all(np.isfinite(run.column("lambda_max")).all() for run in result.courses.values())


def test_every_experiment_and_signal_has_its_line():
    for name in EXPERIMENTS:
        assert f"`{name}`" in PAGE
    for words in SIGNALS.values():
        assert words in PAGE
