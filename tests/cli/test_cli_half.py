"""The command line on a folder whose weights stay in half precision: right numbers, or one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from commands import call
from saved_models import save_family

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("undrawn", "few_sequences")
FEW = ("--tokens", "64", "--set", "seq_len=16")
SHORT = [word for name in ("num_steps", "part_steps") for word in ("--set", f"{name}=4")]
SHORT += ["--set", "num_probes=1", "--set", "num_shared=2", "--set", "block_steps=0"]
STUDIES = {
    "gap": (
        "--blocks",
        "L1.W_[QV]",
        "--set",
        "num_density_probes=0",
        "--set",
        "num_draws=0",
        "--set",
        "num_steps=4",
    ),
    "weight_norms": ("--blocks", "L1.W_[QV]", "--set", "num_models=0"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Weights in bfloat16, and the same ones in float32."""
    import transformers

    folder = save_family(tmp_path_factory.mktemp("models") / "half", "llama")
    module: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    module.save_pretrained(folder)
    wide = str(tmp_path_factory.mktemp("models") / "wide")
    save_family(wide, "llama")
    module.float().save_pretrained(wide)
    return {"bfloat16": folder, "float32": wide}


def summary(study: str, kind: str, folders: dict[str, str], out, capsys) -> dict[str, str]:
    words = ("run", study, folders[kind], "--dtype", kind, *FEW, *STUDIES[study])
    code, said, err = call(*words, "--json", "-q", "--out", out / kind, capsys=capsys)
    assert code == 0, err
    return {line["label"]: line["value"] for line in json.loads(said)["summary"] if line["label"] != "note"}


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_gives_the_numbers_of_the_wide_model(study: str, folders, tmp_path, capsys):
    half, wide = (summary(study, kind, folders, tmp_path, capsys) for kind in ("bfloat16", "float32"))
    assert half == wide


def test_a_hint_is_in_the_words_of_the_command_line(folders, tmp_path, capsys):
    words = ("run", "propagation", folders["bfloat16"], "--dtype", "bfloat16", *FEW, "--out", tmp_path)
    code, _, err = call(*words, "-q", capsys=capsys)
    assert code == 2
    assert "not supported for weights stored in half precision" in err
    assert "hint: --dtype float32; " in err
    assert "cs.load" not in err


def test_the_settings_say_what_types_there_are(capsys):
    for study in ("spectrum", "heads"):
        _, out, _ = call("run", study, "--settings", capsys=capsys)
        assert "bfloat16 and float16" in " ".join(out.split())


def test_a_diagnosis_says_how_many_checks_it_left_out(folders, tmp_path, capsys):
    words = ("diagnose", folders["bfloat16"], "--dtype", "bfloat16", *FEW, "--out", tmp_path, "-q")
    code, out, err = call(*words, *SHORT, capsys=capsys)
    assert code == 0, err
    left = out[out.index("\nnot looked at\n") :].split("\n\n")[0].strip().splitlines()[1:]
    assert f"checks, {len(left)} not looked at, loss" in out
    assert any("sharp_sequences" in line and "half precision" in line for line in left)
