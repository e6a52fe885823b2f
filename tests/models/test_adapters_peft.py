"""LoRA by PEFT: base weights under their roles and once, LoRA matrices as a selection, exact products."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft

import adapters_cases as cases
import curvescope as cs
from adapters_cases import relative
from curvescope.models.capture import capture
from curvescope.models.model import check_cover
from selection import some

TARGETS = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "v_proj"], "bert": ["query", "value"]}
every = pytest.mark.parametrize("name", TARGETS)


def wrapped(name: str, **options: Any) -> Any:
    """A PeftModel around the tiny model of a family, all of its matrices away from zero, in float64."""
    inner = cases.original(name, attention="eager")
    fan = {"fan_in_fan_out": True} if name == "gpt2" else {}
    config = peft.LoraConfig(r=2, target_modules=TARGETS[name], **fan, **options)
    return cases.shaken(peft.get_peft_model(inner, config).double()).eval()


@every
@pytest.mark.parametrize("kind", [None, "CAUSAL_LM"])
def test_a_wrapped_model_is_the_model_with_lora_beside_it(name: str, kind: str | None):
    if name == "bert" and kind:
        pytest.skip("an encoder is no causal model")
    module = wrapped(name, task_type=kind)
    model = cs.load(module)
    assert model.module is module
    check_cover(model.blocks, module)
    plain = cases.loaded(name)
    assert set(plain.blocks) < set(model.blocks)
    assert not set(model.blocks) & set(dict(model.named_parameters()))
    for block in plain.blocks:
        assert model.blocks[block].shape == plain.blocks[block].shape
    assert set(plain.heads) == set(model.heads)
    assert model.facts == {**plain.facts, "tied": model.facts["tied"]}
    x, _ = cases.data(name)
    with torch.no_grad():
        assert relative(model.forward({}, x), module(x).logits.double()) < (1e-5 if model.casts else 1e-12)
    assert model.options == plain.options
    assert "L0.attn.pattern" in capture(model, x)


def test_names_and_shapes():
    found = {
        n: b.shape for n, b in cs.load(wrapped("gpt2")).blocks.items() if "lora" in n and n.startswith("L0")
    }
    D, F = cases.D, cases.F
    assert found == {
        "L0.W_QKV.lora_A": (D, 2),
        "L0.W_QKV.lora_B": (2, 3 * D),
        "L0.W_1.lora_A": (D, 2),
        "L0.W_1.lora_B": (2, F),
    }
    module = wrapped("llama")
    module.add_adapter("french", peft.LoraConfig(r=1, target_modules=["q_proj"]))
    model = cs.load(module.double())
    assert model.blocks["L1.W_Q.lora_A.french"].shape == (D, 1)
    assert model.blocks["L1.W_Q.lora_A"].shape == (D, 2)
    assert len(model.space("L0.*lora*")) == 6
    check_cover(model.blocks, model.module)


@pytest.mark.parametrize("name", some(["llama", "gpt2", "bert"], 1))
def test_blocks_are_slices_of_the_dense_hessian(name: str):
    module = wrapped(name)
    model = cs.load(module)
    x, y = cases.data(name)
    problem = cs.Problem(model, (x, y))
    lora = model.space("*lora*")
    assert len(lora) == 2 * 2 * len(TARGETS[name])
    gain = model.blocks["L1.ln1.g"]
    raw = [b.parameter for b in lora] + [gain.parameter]
    truth, places = cases.dense_hessian(module, raw, x, y, exact=True)
    order = torch.cat([places[b.parameter].T.flatten() for b in lora])
    H = cs.Hessian(problem).block("*lora*")
    assert relative(H @ torch.eye(lora.size, dtype=torch.float64), truth[order][:, order]) < 1e-10
    both = cs.Hessian(problem, "*lora*", "L1.ln1.g")
    assert both.shape[0] == lora.size + gain.size
    own = {b.name: places[b.parameter].T.flatten() for b in lora} | {gain.name: places[gain.parameter]}
    order = torch.cat([own[b.name] for b in both.space])
    assert relative(both @ torch.eye(both.shape[0], dtype=torch.float64), truth[order][:, order]) < 1e-10
    assert float(truth.abs().max()) > 1e-4


def test_the_product_with_base_weights_is_that_of_the_merged_model():
    """LoRA only adds B A to W_Q, so the block of W_Q is that of a plain model with the sum in its place."""
    module = wrapped("bert")
    x, y = cases.data("bert")
    H = cs.Hessian(cs.Problem(cs.load(module), (x, y))).block("L0.W_Q")
    merged = cs.load(copy.deepcopy(module).merge_and_unload())
    truth = cs.Hessian(cs.Problem(merged, (x, y), params="*")).block("L0.W_Q")
    assert not any("lora" in n for n in merged.blocks)
    eye = torch.eye(H.shape[0], dtype=torch.float64)
    assert relative(H @ eye, truth @ eye) < 1e-10


def test_a_merged_model_may_keep_the_configuration_of_its_adapter():
    """PEFT 0.15 leaves `peft_config` on a model that it no longer wraps."""
    module = wrapped("bert").merge_and_unload()
    module.peft_config = {}
    model = cs.load(module)
    assert model.facts["kind"] == "bert"
    assert not any("lora" in name for name in model.blocks)


def test_what_varies_are_the_lora_matrices():
    """PEFT freezes the base: it is left out, which a note says, and curvature there is asked for by name."""
    module = wrapped("llama")
    assert not any(p.requires_grad for n, p in module.named_parameters() if "lora" not in n)
    x, y = cases.data("llama")
    problem = cs.Problem(cs.load(module), (x, y))
    assert problem.space().blocks == problem.model.space("*lora*").blocks
    assert cs.Hessian(problem).block("L0.*").space.blocks == problem.model.space("L0.*lora*").blocks
    assert any("are frozen" in note and "E, L0.W_Q" in note for note in problem.notes)
    assert len(cs.Problem(problem.model, (x, y), params="*").space()) == len(problem.model.blocks)
    H = cs.Hessian(problem).block("L0.W_K")
    assert float((H @ torch.ones(H.shape[0], dtype=torch.float64)).abs().max()) > 0
    assert not module.model.model.layers[0].self_attn.k_proj.weight.requires_grad


# ---------------------------------------------------------------------------------------- folders of PEFT


def write_folder(place: Path, **changes: Any) -> Any:
    """The module whose LoRA matrices, and nothing else, are written to a folder."""
    module = peft.get_peft_model(
        cases.original("llama"), peft.LoraConfig(r=2, target_modules=TARGETS["llama"])
    ).double()
    for name, p in module.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(p.data)
    module.eval().save_pretrained(place)
    config = json.loads((place / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": str(cases.saved("llama"))} | changes
    (place / "adapter_config.json").write_text(json.dumps(config))
    return module


def test_a_folder_with_lora_matrices_is_the_model_it_names(tmp_path: Path):
    module = write_folder(tmp_path / "lora")
    assert not (tmp_path / "lora" / "config.json").exists()
    model = cs.load(tmp_path / "lora", dtype="float64")
    assert model.name == "lora"
    x, y = cases.data("llama")
    with torch.no_grad():
        assert relative(model.forward({}, x), module(x).logits.double()) < 1e-5
    twin = cs.load(module)
    assert set(model.blocks) == set(twin.blocks)
    assert cs.Problem(model, (x, y)).space().blocks == model.space("*lora*").blocks
    ours, theirs = (cs.Hessian(cs.Problem(m, (x, y))).block("*lora*") for m in (model, twin))
    v = torch.ones(ours.shape[1], dtype=torch.float64)
    assert relative(ours @ v, theirs @ v) < 1e-5
    assert float((ours @ v).norm()) > 0


def test_the_model_may_lie_beside_its_lora_matrices(tmp_path: Path):
    write_folder(tmp_path / "lora", base_model_name_or_path="../base")
    shutil.copytree(cases.saved("llama"), tmp_path / "base")
    assert "L0.W_Q.lora_A" in cs.load(tmp_path / "lora").blocks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "expected LoRA"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path"),
        ({"base_model_name_or_path": "/no/where/at all"}, "does not exist"),
    ],
)
def test_bad_folders_get_one_sentence(tmp_path: Path, changes: dict[str, Any], words: str):
    write_folder(tmp_path, **changes)
    with pytest.raises(cs.UsageError, match=words):
        cs.load(tmp_path)


def test_a_folder_that_is_cut_short_gets_one_sentence(tmp_path: Path):
    write_folder(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(cs.CurvescopeError, match="could not read the weights"):
        cs.load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(cs.CurvescopeError, match="could not read"):
        cs.load(tmp_path)
