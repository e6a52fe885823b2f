"""The page of a run: one file, there after every measurement, whatever ends the run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from monitor_loops import IDS, PROBE, TARGETS, tiny
from torch.nn import functional as F

import curvescope as cs
from curvescope.monitor.run_history import RunHistory
from curvescope.monitor.run_page import PAGE, render


class Checked(HTMLParser):
    """Tags that were opened are closed, and nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.links += [str(v) for k, v in attributes if k in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(text: str) -> None:
    page = Checked()
    page.feed(text)
    assert (page.open, page.links) == ([], [])
    assert "http://" not in text
    assert "https://" not in text
    assert "nan" not in re.sub(r"<[^>]*>", "", text)
    assert not re.search(r'="[^"]*\b(nan|inf)\b', text)


def train(out, steps, lr=1.0, every=1):
    module = tiny()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    monitor = cs.CurvatureMonitor(
        module, PROBE, every=every, budget=1.0, blocks=False, num_probes=2, out=out, raise_errors=True
    )
    for step in range(steps):
        loss = F.cross_entropy(module(IDS).flatten(0, 1), TARGETS.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(step, optimizer=optimizer, loss=loss)
    return monitor


def test_the_page_is_written_with_every_measurement(tmp_path):
    monitor = train(tmp_path / "run", 9)
    page = tmp_path / "run" / PAGE
    going_on = page.read_text(encoding="utf-8")
    check(going_on)
    assert 'http-equiv="refresh"' in going_on
    for finding in monitor.findings:
        assert finding.name.replace("_", " ") in going_on
    monitor.close()
    finished = page.read_text(encoding="utf-8")
    check(finished)
    assert "refresh" not in finished
    assert not list(page.parent.glob("*.partial"))


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from test_monitor_run_page import train
train({out!r}, 3)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_page_is_there_after_a_kill(tmp_path):
    out = str(tmp_path / "run")
    code = KILLED.format(paths=sys.path, out=out)
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    text = (tmp_path / "run" / PAGE).read_text(encoding="utf-8")
    check(text)
    assert "3 measurements" in text


def test_hard_values_make_a_page():
    at = np.arange(6.0)
    hard = np.array([1.0, np.nan, np.inf, 1e30, 0.0, -2.0])
    columns = {"step": at, "loss": hard, "lambda_max": hard, "lr": hard, "sharpness": hard}
    check(render({"model": "<b>&"}, RunHistory(columns), finished=True))
    check(render({}, RunHistory({}), finished=False))
    assert "<b>&" not in render({"model": "<b>&"}, RunHistory(columns), finished=True)


def test_a_page_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    import curvescope.monitor.monitor as module

    def broken(*args, **kwargs):
        raise OSError("the disk is full")

    monkeypatch.setattr(module, "write_page", broken)
    monitor = cs.CurvatureMonitor(
        tiny(), PROBE, every=1, budget=1.0, blocks=False, num_probes=2, out=tmp_path / "run"
    )
    with pytest.warns(UserWarning, match="the disk is full"):
        monitor.step(0)
    assert len(monitor.history) == 1
    monitor.close()
