"""The folder of a monitor, read while it grows: whole rows, each once, and whether it still grows."""

from __future__ import annotations

import math
import os
import shutil
import time

import pytest

from curvescope.core.errors import UsageError
from curvescope.runs.live_history import LiveHistory
from histories import add, begin, row


def steps(rows):
    return [r["step"] for r in rows]


def test_rows_come_once_and_whole(tmp_path):
    run = LiveHistory(begin(tmp_path, row(0)))
    assert steps(run.rows) == [0]
    assert run.refresh() == []
    half = row(100)
    add(tmp_path, row(50) + half[:7])
    assert steps(run.refresh()) == [50]
    add(tmp_path, half[7:])
    assert steps(run.refresh()) == [100]
    assert steps(run.rows) == [0, 50, 100]
    assert run.last()["converged"] == 1.0


def test_a_run_that_went_back_is_read_anew(tmp_path):
    run = LiveHistory(begin(tmp_path, row(0), row(50), row(100)))
    begin(tmp_path, row(0), row(50, top=11.0))  # killed, and resumed from a checkpoint before 50
    assert [r["lambda_max"] for r in run.refresh()] == [11.0]
    assert steps(run.rows) == [0, 50]


def test_empty_words_are_numbers_that_are_missing(tmp_path):
    begin(tmp_path)
    add(tmp_path, "0,1.0,,2.5,3.0,,False,,\n")
    run = LiveHistory(tmp_path)
    assert math.isnan(run.last()["share"])
    assert run.last()["converged"] == 0.0
    assert math.isnan(run.column("never measured")[0])


def test_no_row_yet(tmp_path):
    run = LiveHistory(begin(tmp_path))
    assert (run.rows, run.last(), run.blocks()) == ([], {}, [])
    assert run.status() == "going on"
    (tmp_path / "history.csv").write_text("", encoding="utf-8")  # not even its first line
    assert LiveHistory(tmp_path).rows == []
    (tmp_path / "history.csv").rename(tmp_path / "monitor.toml")  # begun, and nothing measured
    run = LiveHistory(tmp_path)
    assert (run.rows, run.status()) == ([], "going on")
    begin(tmp_path, row(0))
    assert steps(run.refresh()) == [0]


def test_a_column_of_words_is_left_out(tmp_path):
    lines = ["step,seconds,lambda_max,left_out", "0,1.0,3.0,trace blocks", "50,2.0,3.0,"]
    (tmp_path / "history.csv").write_text("\n".join([*lines, ""]), encoding="utf-8")
    assert LiveHistory(tmp_path).rows[0] == {"step": 0.0, "seconds": 1.0, "lambda_max": 3.0}


def test_going_on_stopped_and_finished(tmp_path):
    run = LiveHistory(begin(tmp_path, row(0, seconds=0.1), row(50, seconds=2.0)))
    assert run.status() == "going on"
    old = time.time() - 300
    os.utime(tmp_path / "history.csv", (old, old))
    assert run.status() == "stopped"
    assert run.age() == pytest.approx(300, abs=30)
    (tmp_path / "result.json").touch()
    assert run.status() == "finished"


def test_a_slow_run_is_given_its_time(tmp_path):
    run = LiveHistory(begin(tmp_path, row(0, seconds=1.0), row(50, seconds=101.0)))
    old = time.time() - 300
    os.utime(tmp_path / "history.csv", (old, old))
    assert run.status() == "going on"


def test_blocks_of_the_last_measurement_the_sharpest_first(tmp_path):
    begin(tmp_path, row(0))
    lines = ["step,block,lambda_max,trace", "0,E,9,1", "50,E,1,1", "50,L0.W_V,5,1", "50,U,,1", "100,E,"]
    (tmp_path / "blocks.csv").write_text("\n".join(lines), encoding="utf-8")  # the last line is not whole
    assert LiveHistory(tmp_path).blocks() == [("L0.W_V", 5.0), ("E", 1.0)]


def test_what_is_no_folder_of_a_monitor_is_one_sentence(tmp_path):
    begin(tmp_path / "mine", row(0))
    (tmp_path / "other").mkdir()
    for wrong in (tmp_path, tmp_path / "other", tmp_path / "nowhere"):
        with pytest.raises(UsageError, match=r"expected the folder of a monitor.*there is .*mine"):
            LiveHistory(wrong)
    (tmp_path / "other" / "history.csv").write_text("epoch,accuracy\n1,0.5\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"with its history.csv, got .*other"):
        LiveHistory(tmp_path / "other")
    add(tmp_path / "mine", "0,one,2,3,4,5,6,7,8\n")
    with pytest.raises(UsageError, match="expected rows of numbers"):
        LiveHistory(tmp_path / "mine")


def test_a_folder_that_goes_away_is_one_sentence(tmp_path):
    run = LiveHistory(begin(tmp_path / "mine", row(0)))
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(UsageError, match="which does not exist"):
        run.refresh()


def test_a_measurement_that_is_being_made_is_not_a_stop(tmp_path):
    run = LiveHistory(begin(tmp_path, row(0)))
    long_ago = time.time() - 1000
    os.utime(tmp_path / "history.csv", (long_ago, long_ago))
    assert run.status() == "stopped"
    state = tmp_path / "state"
    state.mkdir()
    (state / "measuring.json").write_text('{"step": 50, "products": 120, "expected": 390}', encoding="utf-8")
    assert run.status() == "measuring"
    assert run.measuring() == {"step": 50, "products": 120, "expected": 390}
    os.utime(state / "measuring.json", (long_ago, long_ago))  # and the process was killed
    assert run.status() == "stopped"
    (state / "measuring.json").write_text("{", encoding="utf-8")
    assert (run.measuring(), run.status()) == ({}, "going on")
