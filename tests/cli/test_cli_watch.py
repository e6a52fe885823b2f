"""`curvescope watch`: what it shows of a run that goes on, is finished, or was stopped."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time

import pytest

from commands import call
from curvescope.cli import watch as watch_run
from curvescope.cli.watch import sparkline, verdict
from histories import add, begin, row


@pytest.fixture
def run(tmp_path):
    folder = begin(
        tmp_path / "mine", row(0, top=5.0), row(50, top=20.0, ratio=1.9), row(100, top=42.0, ratio=2.1)
    )
    lines = ["step,block,lambda_max", "100,E,3", "100,L0.W_V,40", ""]
    (folder / "blocks.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_once_prints_the_panel(run, capsys):
    code, out, err = call("watch", run, "--once", capsys=capsys)
    assert (code, err) == (0, "")
    assert "step 100 · going on" in out
    assert "42.000 ± 0.010" in out
    assert "▁▄█  5.000 to 42.00" in out
    assert "above 2" in out
    assert "η·λ_max was above its threshold at 1 of 3 measurements, most at step 100: 2.100" in out
    assert "sharpest blocks: L0.W_V 40.00, E 3.000" in out
    assert "3 measurements, 5.0% of the time so far" in out
    assert "\x1b" not in out


def test_the_last_row_as_an_object(run, capsys):
    add(run, "150,15,,2.5,43.0,,True,,\n")
    code, out, _ = call("watch", run, "--json", capsys=capsys)
    found = json.loads(out)
    assert code == 0
    assert (found["step"], found["lambda_max"], found["share"], found["status"]) == (
        150,
        43.0,
        None,
        "going on",
    )


def test_nothing_measured_yet(tmp_path, capsys):
    begin(tmp_path)
    assert "no measurement yet" in call("watch", tmp_path, "--once", capsys=capsys)[1]
    assert json.loads(call("watch", tmp_path, "--json", capsys=capsys)[1]) == {"status": "going on"}


def test_a_stopped_run_says_so(run, capsys):
    old = time.time() - 3600
    os.utime(run / "history.csv", (old, old))
    _, out, _ = call("watch", run, "--once", capsys=capsys)
    assert "stopped (or paused: nothing for 60 min)" in out


def test_a_measurement_that_is_being_made_shows_its_products(run, capsys):
    state = run / "state"
    state.mkdir(exist_ok=True)
    (state / "measuring.json").write_text('{"step": 50, "products": 120, "expected": 390}', encoding="utf-8")
    out = call("watch", run, "--once", capsys=capsys)[1]
    assert "measuring (step 50, 120 of about 390 products)" in out


def test_a_pipe_has_a_line_for_every_row_and_ends_with_the_run(run, monkeypatch, capsys):
    came = [lambda: add(run, row(150)), lambda: (add(run, row(200)), (run / "result.json").touch())]
    monkeypatch.setattr(watch_run.time, "sleep", lambda seconds: came.pop(0)())
    code, out, err = call("watch", run, capsys=capsys)
    assert code == 0
    assert [line.split()[1] for line in out.splitlines()] == ["0", "50", "100", "150", "200"]
    assert "η·λ_max 2.100 (above 2)" in out.splitlines()[2]
    assert err == "finished (5 measurements)\n"


def test_it_is_live_on_a_terminal(run, monkeypatch, capsys):
    came = [lambda: add(run, row(150)), lambda: (run / "result.json").touch()]
    monkeypatch.setattr(watch_run.time, "sleep", lambda seconds: came.pop(0)())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, out, _ = call("watch", run, capsys=capsys)
    assert (code, came) == (0, [])
    last = "".join(out.splitlines()[-12:])
    assert "step 150" in last
    assert "finished" in last


def test_ctrl_c_leaves_quietly(run, monkeypatch, capsys):
    def press(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch_run.time, "sleep", press)
    code, out, err = call("watch", run, capsys=capsys)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 3


def test_bad_folders_are_one_sentence(run, tmp_path, capsys):
    for wrong in (tmp_path, tmp_path / "nowhere", run / "history.csv"):
        code, out, err = call("watch", wrong, "--once", capsys=capsys)
        assert (code, out) == (2, "")
        assert err.startswith("error: expected the folder of a monitor")
        assert "hint: " in err


def test_it_does_not_wait_for_torch(run):
    code = (
        "import sys\nfrom curvescope.cli import main\n"
        f"try:\n    main(['watch', {str(run)!r}, '--once'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'matplotlib', 'pandas') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_bars_show_a_spike_and_a_gap():
    assert sparkline([0, 1, 7]) == "▁▂█"
    assert sparkline([1.0] * 100 + [9.0] + [1.0] * 99, width=10) == "▁▁▁▁▁█▁▁▁▁"
    assert sparkline([1.0, math.nan, math.inf, 2.0]) == "▁  █"
    assert sparkline([3.0]) == "▁"
    assert sparkline([]) == ""


def test_verdicts():
    assert [verdict(v, 2.0) for v in (1.0, 1.9, 2.0, 2.1, math.inf)] == [
        "below",
        "near",
        "near",
        "above",
        "above",
    ]


@pytest.fixture
def unstable(tmp_path):
    folder = tmp_path / "unstable"
    folder.mkdir()
    names = (
        "step,seconds,loss,lambda_max,lr,lr_lambda_max,threshold,sharpness,lr_sharpness,sharpness_threshold"
    )
    rows = [
        f"{step},{step},2.0,{top},0.1,{top / 10},2,{top},{top / 10},2"
        for step, top in ((0, 5), (10, 15), (20, 30), (30, 40), (40, 25))
    ]
    (folder / "history.csv").write_text("\n".join([names, *rows, ""]), encoding="utf-8")
    losses = [f"{step},{2.0 if step != 33 else 7.0}" for step in range(45)]
    (folder / "steps.csv").write_text("\n".join(["step,loss", *losses, ""]), encoding="utf-8")
    shares = [f"{step},{block},{share}" for step in (20, 30, 40) for block, share in (("U", 0.1), ("E", 0.9))]
    (folder / "blocks.csv").write_text(
        "\n".join(["step,block,sharpness_share", *shares, ""]), encoding="utf-8"
    )
    return folder


def test_the_panel_says_why(unstable, capsys):
    out = call("watch", unstable, "--once", capsys=capsys)[1]
    for part in ("fault: ", "crossed the optimizer's threshold at step 20", "33 follows", "E carries 90 %"):
        assert part in out
    assert "nothing unusual" not in out


def test_a_healthy_panel_says_so(run, capsys):
    assert "nothing unusual" in call("watch", run, "--once", capsys=capsys)[1]


def test_a_pipe_tells_a_finding_once(unstable, monkeypatch, capsys):
    def end(seconds):
        (unstable / "result.json").touch()

    monkeypatch.setattr(watch_run.time, "sleep", end)
    out = call("watch", unstable, capsys=capsys)[1]
    assert sum(line.startswith("fault: ") for line in out.splitlines()) == 1


def test_findings_as_objects(unstable, capsys):
    (finding,) = json.loads(call("watch", unstable, "--json", capsys=capsys)[1])["findings"]
    assert (finding["name"], finding["step"], finding["where"]) == ("learning_rate", 20, "E")
    assert [finding] == json.loads(call("diagnose", unstable, "--json", capsys=capsys)[1])


def test_diagnose_takes_the_folder_of_a_monitor(unstable, capsys):
    code, out, err = call("diagnose", unstable, capsys=capsys)
    assert (code, err) == (0, "")
    assert "1 fault in 5 measurements" in out
    assert "do: lower the learning rate about 1.5×" in " ".join(out.split())
    assert "largest stable learning rate 0.05" in out


def test_diagnose_refuses_settings_of_a_run(unstable, capsys):
    code, _, err = call("diagnose", unstable, "--lr", "0.1", capsys=capsys)
    assert code == 2
    assert "the folder of a monitor" in err
