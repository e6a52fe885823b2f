"""How far a run is: a line for every finished piece in a pipe, bars on a terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from curvescope.cli import run_progress
from curvescope.cli.arguments import command_line
from curvescope.core.progress import track


def test_in_a_pipe_a_finished_piece_is_one_line(capsys):
    with run_progress.progress_display(False) as watch:
        watch.say("three studies")
        watch.part("1 of 3: spectrum, why", 0, 10, 30)
        watch.piece("density", 1, 2)
        list(track(range(5), "Lanczos"))
        watch.say("resuming")
        watch.answer("λ max 3")
        watch.piece("traces", 2, 2)
        watch.part("2 of 3: heads, why", 10, 20, 30)
        watch.piece("all", 1, 1)
        watch.fail("heads failed: the sun is down")
        watch.part("3 of 3: blocks, why", 20, 30, 30)
        watch.piece("last", 1, 1)
    assert capsys.readouterr().err.splitlines() == [
        "three studies",
        "1 of 3: spectrum, why",
        "  resuming",
        "  1/2 density: λ max 3",
        "  2/2 traces",
        "2 of 3: heads, why",
        "  heads failed: the sun is down",
        "3 of 3: blocks, why",
        "  1/1 last",
    ]


def test_a_piece_that_was_stopped_is_not_said_to_be_done(capsys):
    with pytest.raises(KeyboardInterrupt), run_progress.progress_display(False) as watch:
        stop(watch)
    assert capsys.readouterr().err == ""


def stop(watch):
    watch.piece("density", 1, 2)
    raise KeyboardInterrupt


def test_quiet_says_nothing(capsys):
    with run_progress.progress_display(True) as watch:
        watch.part("1 of 1", 0, 1, 1)
        watch.piece("density", 1, 2)
        watch.answer("λ max 3")
        watch.say("a line")
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_there_are_bars_for_all_for_pieces_and_for_the_loop(monkeypatch):
    shown = io.StringIO()
    made = {"file": shown, "force_terminal": True, "width": 120, "color_system": None}
    monkeypatch.setattr("rich.console.Console", lambda stderr: Console(**made))
    monkeypatch.setattr(run_progress.sys.stderr, "isatty", lambda: True, raising=False)
    with run_progress.progress_display(False) as watch:
        watch.say("a line [in brackets]")
        watch.part("2 of 3: spectrum, why", 10, 20, 30)
        watch.piece("traces", 2, 4)
        watch.loop("Lanczos", 3, 5)
        assert watch.steps == 5
    text = shown.getvalue()
    assert "a line [in brackets]\n" in text
    assert "2 of 3: spectrum, why" in text
    assert "piece 2 of 4: traces" in text
    assert "left" in text


def test_the_command_that_goes_on_can_be_pasted():
    command_line.store_arguments(["run", "spectrum", "--out", "my runs"])
    assert command_line.resume_hint().endswith(": curvescope run spectrum --out 'my runs'")
    assert not command_line.wants_traceback()


def test_threads_that_wait_do_not_spin():
    code = (
        "import os\nfrom curvescope.cli import main\n"
        "try:\n    main(['--version'])\nexcept SystemExit: pass\nprint(os.environ['OMP_WAIT_POLICY'])"
    )
    for given, found in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        env |= {} if given is None else {"OMP_WAIT_POLICY": given}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert done.stdout.split()[-1] == found


def test_in_a_pipe_many_pieces_are_about_ten_lines_and_the_last_is_among_them(capsys):
    with run_progress.progress_display(False) as watch:
        for number in range(1, 117):
            watch.piece(f"piece {number}", number, 116)
            if number % 2:
                watch.answer("an answer")
    found = capsys.readouterr().err.splitlines()
    assert 5 <= len(found) <= 12
    assert found[-1] == "116/116 piece 116"
