"""`curvescope info`: roles, notes, precision, and a choice of blocks."""

import json
import types

import pytest

from commands import call
from curvescope.models.description import notes

TIED = "n_layers = 3\nd_model = 4\nn_heads = 2\nd_ff = 0\nvocab_size = 12\nn_ctx = 18\ntied = true\n"


@pytest.fixture
def tied(tmp_path):
    path = tmp_path / "tied.toml"
    path.write_text(TIED, encoding="utf-8")
    return path


def test_roles_gather_the_layers(tied, capsys):
    code, out, _ = call("info", tied, capsys=capsys)
    assert code == 0
    (row,) = [line.split() for line in out.splitlines() if line.startswith("L*.W_Q")]
    assert row[:5] == ["L*.W_Q", "3", "4", "×", "4"]
    assert row[5] == "48"
    assert out.count("note: ") == 1
    assert "note: the unembedding is the embedding" in out
    assert "float32: " in out
    assert "relative error" in out


def test_blocks_choose_what_is_listed(tied, capsys):
    code, out, _ = call("info", tied, "--blocks", "L1.h*.W_Q", "--blocks", "E", capsys=capsys)
    assert code == 0
    assert "L1.h1.W_Q" in out
    assert "L1.W_Q (part)" in out
    assert "L0" not in out
    assert "L*" not in out
    code, out, _ = call("info", tied, "--json", "--blocks", "L2.W_*", capsys=capsys)
    found = json.loads(out)
    assert [row["block"] for row in found["blocks"]] == ["L2.W_Q", "L2.W_K", "L2.W_V", "L2.W_O"]
    assert sum(row["parameters"] for row in found["roles"]) == found["parameters"]
    code, out, err = call("info", tied, "--blocks", "L9.*", capsys=capsys)
    assert (code, out) == (2, "")
    assert "no block matches 'L9.*'" in err


def test_facts_become_notes_unless_they_are_said_already():
    facts = {"dropout": 0.1, "tied": True, "num_experts": 8}
    silent = notes(types.SimpleNamespace(notes=("attention was switched",), facts=facts))
    assert silent[0] == "attention was switched"
    assert [word in " ".join(silent) for word in ("dropout (0.1)", "tied weights", "8 experts")] == [True] * 3
    own = ("dropout is off", "tied: a is b", "a mixture of 8 experts")
    assert notes(types.SimpleNamespace(notes=own, facts=facts)) == list(own)


SOME = ("--data", "task:addition", "--set", "num_steps=4", "--set", "num_probes=1")


@pytest.mark.usefixtures("few_sequences")
def test_a_plan_says_what_a_run_takes(tied, capsys, monkeypatch):
    monkeypatch.setattr("curvescope.studies.preflight.measurements.PATIENCE", 0.1)
    code, out, err = call("info", tied, "--plan", "spectrum", *SOME, capsys=capsys)
    assert code == 0
    said = [line.split(":")[0] for line in out.splitlines()]
    assert said[1:7] == ["attention", "float32", "dropout", "tied weights", "memory", "time"]
    assert "spectrum" in err
    assert "up to about " not in err  # one prediction
    assert "H = H_o + H_f" in out
    code, out, err = call("info", tied, "--plan", "spectrum", *SOME, "--json", "--quiet", capsys=capsys)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["plan"]["settings"]["num_steps"] == 4
    assert found["plan"]["fits"] is True
    file = tied.parent / "settings.toml"
    file.write_text('data = "task:addition"\nnum_steps = 5\nnum_probes = 1\n', encoding="utf-8")
    given = ("--config", file, "--json", "--quiet")
    found = json.loads(call("info", tied, "--plan", "spectrum", *given, capsys=capsys)[1])
    assert found["plan"]["settings"]["num_steps"] == 5
    assert sum(row["parameters"] for row in found["roles"]) == found["parameters"]


@pytest.mark.usefixtures("few_sequences")
def test_a_plan_with_a_precision_says_how_much_data_it_takes(tied, capsys, monkeypatch):
    monkeypatch.setattr("curvescope.studies.preflight.measurements.PATIENCE", 0.1)
    asked = ("--plan", "spectrum", *SOME, "--precision", "20%")
    code, out, _ = call("info", tied, *asked, capsys=capsys)
    assert code == 0
    for quantity in ("trace", "‖·‖_F", "λ_max", "λ_min"):
        assert any(line.startswith(quantity) for line in out.splitlines())
    assert out.splitlines()[-1].startswith("to 20 %: ")
    found = json.loads(call("info", tied, *asked, "--json", "--quiet", capsys=capsys)[1])["plan"]["precision"]
    assert set(found) == {"trace", "norm", "largest", "smallest"}
    assert found["trace"]["precision"] == 0.2
    assert found["trace"]["tokens_low"] <= found["trace"]["tokens"] <= found["trace"]["tokens_high"]
    assert found["trace"]["held"] in (True, False)
    code, _, err = call("info", tied, "--plan", "spectrum", "--precision", "tenth", capsys=capsys)
    assert code == 2
    assert "got 'tenth'" in err
    code, _, err = call("info", tied, "--precision", "10%", capsys=capsys)
    assert code == 2
    assert "add --plan STUDY" in err


def test_a_plan_of_a_study_that_has_none(tied, capsys):
    code, out, _ = call("info", tied, "--plan", "heads", capsys=capsys)
    assert code == 0
    assert out.splitlines()[-1].startswith("heads has no plan")
    code, _, err = call("info", tied, "--tokens", "64", capsys=capsys)
    assert code == 2
    assert "add --plan STUDY" in err
    code, _, err = call("info", tied, "--plan", "spectral", capsys=capsys)
    assert code == 2
    assert "spectrum" in err
