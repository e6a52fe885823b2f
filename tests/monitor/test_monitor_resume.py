"""A run that was killed goes on with its loop."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from monitor_loops import IDS, PROBE, TARGETS, fit, tiny

import curvescope as cs
from curvescope.monitor.files import read_rows


def watch(out, module=None, **options):
    settings = {"every": 2, "budget": 1.0, "blocks": "L0.W_Q", "num_probes": 2, **options}
    return cs.CurvatureMonitor(module or tiny(), PROBE, out=out, **settings)


def optimizer_of(module):
    return torch.optim.SGD(module.parameters(), lr=0.05)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with measurements at 0, 2 and 4, whose process was killed while it wrote a row."""
    folder, module = tmp_path_factory.mktemp("killed") / "run", tiny()
    fit(module, optimizer_of(module), watch(folder, module), steps=range(6))
    with (folder / "history.csv").open("a") as file:
        file.write("6,1.5,0.")
    return folder


@pytest.fixture
def killed(original, tmp_path, undrawn):
    """A copy of it."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def test_rows_are_whole_and_read_by_anybody(killed):
    import pandas as pd

    rows = read_rows(killed / "history.csv")
    assert [row["step"] for row in rows] == [0, 2, 4]
    blocks = pd.read_csv(killed / "blocks.csv")
    assert blocks["step"].unique().tolist() == [0, 2, 4]
    assert not (killed / "result.json").exists()
    assert tomllib.loads((killed / "config.toml").read_text())["study"] == "monitor"


def test_it_goes_on_where_the_loop_does(killed):
    before = read_rows(killed / "history.csv")
    monitor = watch(killed)
    assert monitor.history["step"].tolist() == [0, 2, 4]
    fit(tiny(), optimizer_of(tiny()), monitor, steps=range(3, 8))
    after = read_rows(killed / "history.csv")
    assert [row["step"] for row in after] == monitor.history["step"].tolist() == [0, 2, 4, 6]
    assert [row["lambda_max"] for row in after[:2]] == [row["lambda_max"] for row in before[:2]]
    assert after[2]["lambda_max"] != before[2]["lambda_max"]
    assert after[3]["seconds"] > before[2]["seconds"]
    assert {row["step"] for row in read_rows(killed / "blocks.csv")} == {0, 2, 4, 6}


def test_it_begins_with_the_vectors_of_the_last_time(killed):
    row = watch(killed).measure(5)
    assert row["overlap"] > 0
    assert row["products"] < read_rows(killed / "history.csv")[0]["products"]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"every": 3}, "every = 2, not 3"), ({"seed": 1}, "seed"), ({"loss": "squared_error"}, "loss|targets")],
)
def test_other_settings_are_refused(killed, options, said):
    with pytest.raises(cs.UsageError, match=said):
        watch(killed, **options)


def test_other_data_and_other_models_are_refused(killed):
    options = {"every": 2, "budget": 1.0, "blocks": "L0.W_Q", "num_probes": 2, "out": killed}
    with pytest.raises(cs.UsageError, match="other data or a model of another shape"):
        cs.CurvatureMonitor(tiny(), [(IDS[3:], TARGETS[3:])], **options)
    wide = cs.TransformerConfig(n_layers=1, d_model=8, n_heads=1, n_ctx=4, vocab_size=5, d_ff=8)
    with pytest.raises(cs.UsageError, match="other data or a model of another shape"):
        cs.CurvatureMonitor(cs.Transformer(wide).double(), PROBE, **options)


def test_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(cs.UsageError, match="other files"):
        watch(tmp_path)


def test_a_finished_run_goes_on_but_is_not_overwritten(killed):
    watch(killed).close()
    assert (killed / "result.json").exists()
    assert not (killed / "state").exists()
    before = (killed / "history.csv").read_text()
    anew = watch(killed)
    with pytest.warns(UserWarning, match="the folder stays as it is"):
        assert anew.step(0) is not None
    assert (killed / "history.csv").read_text() == before
    again = watch(killed)
    assert again.step(2) is not None
    assert again.step(8) is not None
    assert not (killed / "result.json").exists()
    again.close()
    assert [row["step"] for row in read_rows(killed / "history.csv")] == [0, 2, 8]


def test_a_bad_cell_is_one_sentence(killed):
    path = killed / "history.csv"
    lines = path.read_text().splitlines()
    cells = lines[2].split(",")
    cells[5] = "nonsense"
    path.write_text("\n".join([*lines[:2], ",".join(cells), *lines[3:], ""]))
    with pytest.raises(cs.UsageError, match=r"history\.csv, line 3, column loss, got 'nonsense'"):
        watch(killed)


@pytest.mark.parametrize("later", [4, 3, 0])
def test_steps_count_on_over_epochs(later):
    monitor = watch(None, raise_errors=True)
    monitor.step(4)
    with pytest.raises(cs.UsageError, match="steps count on over epochs"):
        monitor.step(later)
    with pytest.raises(cs.UsageError, match="steps count on over epochs"):
        monitor.measure(later)
    assert monitor.history["step"].tolist() == [4]


def test_a_step_that_was_not_measured_may_be_told_again():
    monitor = watch(None)
    assert monitor.step(1) is None
    assert monitor.measure(1)["step"] == 1


def test_only_the_first_step_behind_an_opening_goes_back(killed):
    monitor = watch(killed, raise_errors=True)
    monitor.step(3)
    assert monitor.history["step"].tolist() == [0, 2]
    with pytest.raises(cs.UsageError, match="steps count on over epochs"):
        monitor.step(1)
    assert [row["step"] for row in read_rows(killed / "history.csv")] == [0, 2]


def test_a_closed_monitor_says_so():
    monitor = watch(None, raise_errors=True)
    monitor.close()
    monitor.close()
    with pytest.raises(cs.UsageError, match="closed"):
        monitor.step(0)


@pytest.mark.parametrize("name", ["vectors.safetensors", "account.json"])
@pytest.mark.parametrize("how", ["torn", "emptied", "a list", "not a number"])
def test_damaged_state_is_only_a_worse_start(name, how, killed):
    path = killed / "state" / name
    whole = path.read_bytes()
    nan = whole[:-8] + np.array([np.nan]).tobytes() if name[0] == "v" else b'{"elapsed": NaN}'
    path.write_bytes({"torn": whole[: len(whole) // 2], "emptied": b"", "a list": b"[1]"}.get(how, nan))
    monitor = watch(killed)
    fit(tiny(), optimizer_of(tiny()), monitor, steps=range(6, 7))
    assert monitor.history["step"].tolist() == [0, 2, 4, 6]
    assert monitor.history["lambda_max"].notna().all()
    assert not any("failed" in note for note in monitor.notes)


@pytest.mark.parametrize("name", ["history.csv", "blocks.csv"])
@pytest.mark.parametrize("front", [b"\xff\xfe", b"x"])
def test_tables_that_cannot_be_read_are_one_sentence(name, front, killed):
    path = killed / name
    path.write_bytes(front + path.read_bytes())
    with pytest.raises(cs.UsageError, match=name):
        watch(killed)
