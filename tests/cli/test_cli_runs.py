"""`curvescope runs`: every run folder, and removing nothing else."""

import json
import os

import pytest

from commands import call
from curvescope.runs.folder import RunFolder
from curvescope.runs.resumable_loop import Contents
from curvescope.studies import heads, spectrum


@pytest.fixture
def made(tmp_path):
    """A folder that was begun, and one that looks finished."""
    begun = RunFolder(tmp_path, "heads", heads.Config(layers=(0, 1)))
    begun.at("contents")["piece"] = Contents("x")
    done = RunFolder(tmp_path, "spectrum", spectrum.Config(data="notes.txt", num_probes=2))
    done.at("contents")["piece"] = Contents("x")
    Contents("x").save(done.path)
    return {"begun": begun.path, "done": done.path}


def test_runs_are_listed(made, tmp_path, capsys):
    code, out, _ = call("runs", "--out", tmp_path, capsys=capsys)
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert "layers=0,1" in rows[str(made["begun"])]
    assert " no " in rows[str(made["begun"])]
    assert "notes.txt" in rows[str(made["done"])]
    assert "num_probes=2" in rows[str(made["done"])]
    assert "num_steps" not in rows[str(made["done"])]
    code, out, _ = call("runs", "--out", tmp_path, "--json", capsys=capsys)
    begun, done = sorted(json.loads(out), key=lambda r: r["study"])
    assert [begun["finished"], done["finished"]] == [False, True]
    assert [begun["data"], done["data"]] == [None, "notes.txt"]


def test_begun_is_what_the_name_says(made, tmp_path, capsys):
    os.utime(made["done"] / "config.toml", (0, 0))  # copied, or written long after it was begun
    moved = made["done"].rename(made["done"].with_name("20260102-030405-0123abcd"))
    other = made["begun"].rename(made["begun"].with_name("mine"))
    os.utime(other / "config.toml", (86400 * 365, 86400 * 365))
    _, out, _ = call("runs", "--out", tmp_path, "--json", capsys=capsys)
    found = {run["folder"]: run["begun"] for run in json.loads(out)}
    assert found[str(moved)] == "2026-01-02T03:04:05"
    assert found[str(other)].startswith("1971")


def test_no_runs(tmp_path, capsys):
    code, out, err = call("runs", "--out", tmp_path / "none", capsys=capsys)
    assert (code, out) == (0, "")
    assert "no runs in" in err


def test_run_folders_are_removed_after_a_question(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("typer.confirm", lambda *words, **rest: False)
    code, _, err = call("runs", "--remove", made["done"], capsys=capsys)
    assert code == 2
    assert "nothing was removed" in err
    assert made["done"].is_dir()
    code, _, err = call("runs", "--yes", "--remove", made["done"], made["begun"], capsys=capsys)
    assert code == 0, err
    assert not made["done"].exists()
    assert not made["begun"].exists()
    assert not list(tmp_path.iterdir())  # no empty folder of a study either


def test_the_folder_of_a_study_stays_while_it_holds_something(made, tmp_path, capsys):
    (tmp_path / "spectrum" / "notes.txt").touch()
    elsewhere = tmp_path / "kept" / made["begun"].name
    elsewhere.parent.mkdir()
    made["begun"].rename(elsewhere)
    code, _, err = call("runs", "--yes", "--remove", made["done"], elsewhere, capsys=capsys)
    assert code == 0, err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["heads", "kept", "spectrum"]


def test_nothing_but_run_folders_is_removed(made, tmp_path, capsys):
    other = tmp_path / "precious"
    other.mkdir()
    (other / "config.toml").write_text("a = 1", encoding="utf-8")
    link = tmp_path / "link"
    link.symlink_to(made["done"])
    for wrong in (other, link, tmp_path, tmp_path / "nothing"):
        code, _, err = call("runs", "--yes", "--remove", made["done"], wrong, capsys=capsys)
        assert code == 2
        assert "expected a run folder" in err
    assert made["done"].is_dir()
    assert other.is_dir()
