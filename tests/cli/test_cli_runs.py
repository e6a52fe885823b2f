"""`curvescope runs`: every run folder, and removing nothing else."""

import json

import pytest

from commands import call
from curvescope.runs.folder import RunFolder
from curvescope.runs.work import Contents
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
    assert [run["finished"] for run in sorted(json.loads(out), key=lambda r: r["study"])] == [False, True]


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
