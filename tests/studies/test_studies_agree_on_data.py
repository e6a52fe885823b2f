"""Studies agree on a model within the errors that they state, or say that they are not settled."""

from __future__ import annotations

import json
import math

import pytest

from commands import call


def headline(capsys, tmp_path, study, **settings):
    """The first line of a study's summary, and its row of λ_max of the Hessian."""
    pairs = [f"--set={name}={value}" for name, value in settings.items()]
    text = str(tmp_path / "notes.txt")
    words = ("run", study, "tiny-gpt", "--data", text, "--out", tmp_path, "--json", *pairs)
    code, out, err = call(*words, capsys=capsys)
    assert code == 0, err
    told = json.loads(out)
    return told["summary"][0], told["tables"]


@pytest.mark.slow
def test_blocks_and_spectrum_agree_or_say_that_they_are_not_settled(capsys, tmp_path):
    words = "the curvature of a model depends on the text that it reads, and so do its error bars. "
    numbers = " ".join(f"{i} squared is {i * i};" for i in range(400))
    (tmp_path / "notes.txt").write_text(40 * words + numbers, encoding="utf-8")
    small = {"num_steps": 5, "num_probes": 1, "num_map_probes": 1, "num_trace_probes": 2}
    small |= {"tokens": 128, "seq_len": 16, "num_eigenvalues": 1, "map_blocks": "L3.b_*"}
    few = {"num_trace_probes": 2, "norms": "L3.W_V,L3.W_O", "num_norm_probes": 2, "operators": "hessian"}
    spectrum, tables = headline(capsys, tmp_path, "spectrum", **small)
    blocks, _ = headline(capsys, tmp_path, "blocks", tokens=32, seq_len=16, **few)
    for line in (spectrum, blocks):
        assert line["label"].startswith("λ_max")
        assert "settled" in line["words"]
    whole = next(row for row in tables["headline"] if row["quantity"] == "lambda_max")
    assert whole["operator"] == "H"
    assert whole["value_low"] < whole["value"] < whole["value_high"]
    told = blocks["words"].startswith("not settled") or spectrum["words"].startswith("not settled")
    value = float(blocks["value"].split(" ±")[0].removeprefix("about ").replace(",", ""))
    assert told or whole["value_low"] <= value <= whole["value_high"]
    assert not told or blocks["value"].startswith("about") or spectrum["value"].startswith("about")
    assert math.isfinite(value)
