"""Whatever is wrong with a model's source is said in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import adapters_cases as cases
import curvescope as cs
from curvescope.models.hf import source as hf


def copied(tmp: Path, **changes: Any) -> Path:
    """A folder of GPT-2 whose config.json has other entries."""
    folder = Path(shutil.copytree(cases.folder_of("gpt2"), tmp / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def no_weights(tmp: Path) -> Path:
    folder = copied(tmp)
    (folder / "model.safetensors").unlink()
    return folder


def cut_short(tmp: Path) -> Path:
    folder = copied(tmp)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    return folder


def some_missing(tmp: Path) -> Path:
    from safetensors.torch import load_file, save_file

    folder = copied(tmp)
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def broken_config(tmp: Path) -> Path:
    folder = copied(tmp)
    (folder / "config.json").write_text('{"model_type": "gpt2"')
    return folder


def no_type(tmp: Path) -> Path:
    folder = copied(tmp)
    (folder / "config.json").write_text('{"hidden_size": 8}')
    return folder


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("never",))


def evil_pickle(tmp: Path) -> Path:
    folder = no_weights(tmp)
    torch.save({"transformer.wte.weight": Evil()}, folder / "pytorch_model.bin")
    return folder


def evil_checkpoint(tmp: Path) -> Path:
    torch.save({"model": Evil()}, tmp / "ckpt.pt")
    return tmp / "ckpt.pt"


def other_checkpoint(tmp: Path) -> Path:
    torch.save({"state_dict": {}}, tmp / "ckpt.pt")
    return tmp / "ckpt.pt"


def no_checkpoint(tmp: Path) -> Path:
    (tmp / "ckpt.pt").write_bytes(b"not a checkpoint")
    return tmp / "ckpt.pt"


def cut_checkpoint(tmp: Path) -> Path:
    args = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 6}
    E = torch.zeros(3, 8)
    torch.save(
        {"model": {"transformer.wte.weight": E, "lm_head.weight": E}, "model_args": args}, tmp / "ckpt.pt"
    )
    return tmp / "ckpt.pt"


def gguf(tmp: Path) -> Path:
    (tmp / "m.gguf").write_bytes(b"GGUF")
    return tmp / "m.gguf"


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (
        no_weights,
        r"expected model\.safetensors or pytorch_model\.bin in the folder .*, found neither",
    ),
    "weights cut short": (cut_short, r"could not read the weights in .*model"),
    "parameters missing": (
        some_missing,
        r"lack 1 parameters, which would be random: 'transformer\.h\.1\.mlp",
    ),
    "weights of another size": (
        lambda tmp: copied(tmp, n_embd=12),
        r"do not fit the configuration beside them",
    ),
    "broken configuration": (
        broken_config,
        r"expected a configuration in JSON, could not read .*config\.json",
    ),
    "no model_type": (no_type, r"expected a config\.json with a model_type, .* has none"),
    "a type nobody knows": (
        lambda tmp: copied(tmp, model_type="gpt9"),
        r"does not support the architecture of .* \(pip install --upgrade transformers\)",
    ),
    "its own code": (
        lambda tmp: copied(
            tmp, model_type="mine", auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}
        ),
        r"comes with its own code, which is never run|does not support the architecture",
    ),
    "a pickle that runs code": (
        evil_pickle,
        r"has a pickle with other Python objects, which are never loaded",
    ),
    "a checkpoint that runs code": (evil_checkpoint, r"has other Python objects, which are never loaded"),
    "another checkpoint": (other_checkpoint, r"expected a nanoGPT checkpoint with 'model' and 'model_args'"),
    "no checkpoint": (no_checkpoint, r"ckpt\.pt"),
    "half a checkpoint": (cut_checkpoint, r"expected a nanoGPT checkpoint, .* has no 'transformer"),
    "an empty folder": (lambda tmp: tmp, r"expected config\.toml and model\.safetensors in the folder"),
    "another file": (lambda tmp: _file(tmp), r"expected a folder or a \.toml file, got the file"),
    "a path that is not there": (lambda tmp: tmp / "nowhere", r"is none of them"),
}


def _file(tmp: Path) -> Path:
    (tmp / "weights.onnx").write_bytes(b"")
    return tmp / "weights.onnx"


def one_sentence(error: cs.CurvescopeError) -> None:
    assert "\n" not in str(error)
    assert not error.message.endswith(".")
    assert len(error.message) < 400


@pytest.mark.parametrize("name", FOLDERS)
def test_bad_sources_are_one_sentence(name: str, tmp_path: Path, capsys):
    make, message = FOLDERS[name]
    source = make(tmp_path)
    with pytest.raises(cs.CurvescopeError, match=message) as caught:
        cs.load(source)
    one_sentence(caught.value)
    assert "never" not in capsys.readouterr().out


def test_no_network(monkeypatch):
    monkeypatch.setattr(hf, "reachable", lambda: False)
    with pytest.raises(
        cs.UsageError, match=r"'nobody/nothing' is not in the cache, and the hub cannot"
    ) as caught:
        cs.load("nobody/nothing")
    one_sentence(caught.value)
    with pytest.raises(cs.UsageError, match=r"is none of them \(did you mean 'tiny-gpt'\?") as caught:
        cs.load("tiny-gtp")
    one_sentence(caught.value)


def test_no_transformers(monkeypatch):
    import sys

    folder = cases.folder_of("gpt2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        cs.CurvescopeError, match=r"need the package transformers \(pip install '?transformers"
    ):
        cs.load(folder)


def test_no_gguf(monkeypatch, tmp_path):
    monkeypatch.setattr(hf, "find_spec", lambda name: None)
    with pytest.raises(
        cs.CurvescopeError, match=r"reading m\.gguf needs the package gguf \(pip install gguf"
    ):
        cs.load(gguf(tmp_path))


def test_remote_code_is_never_trusted(monkeypatch):
    import transformers

    seen = []
    inner = transformers.AutoConfig.from_pretrained

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(options["trust_remote_code"])
        return inner(*args, **options)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", spy)
    cs.load(cases.folder_of("gpt2"))
    assert seen == [False]
