"""Where models come from: instances, heads, LoRA, TransformerLens, pickles, the hub's cache."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import adapters_cases as cases
import curvescope as cs
from adapters_cases import relative
from curvescope.models.capture import capture
from curvescope.models.hf import source as hf
from curvescope.models.model import check_cover
from selection import some

# --------------------------------------------------------------------------------- instances and attention


def test_a_users_module_is_not_changed(caplog):
    module = cases.original("gpt2", attention="sdpa")
    with caplog.at_level(logging.INFO, logger="curvescope"):
        model = cs.load(module)
    assert module.config._attn_implementation == "sdpa"
    assert model.module is module
    assert any("attention is eager, not sdpa" in note for note in model.notes)
    assert "attention is eager, not sdpa" in caplog.text
    x, _ = cases.data("gpt2")
    torch.testing.assert_close(model.forward({}, x), module(x).logits)


def test_a_module_that_is_plain_already_is_the_same_object():
    module = cases.original("llama", attention="eager")
    model = cs.load(module)
    assert model.module is module
    assert not any("switched" in note for note in model.notes)
    assert "L1.h0.W_K" in model.heads


def test_attention_that_computes_something_else_is_refused(monkeypatch):
    module = cases.original("gpt2", attention="sdpa")
    from transformers.models.gpt2 import modeling_gpt2

    plain = modeling_gpt2.eager_attention_forward
    monkeypatch.setattr(
        modeling_gpt2, "eager_attention_forward", lambda *a, **k: (2 * plain(*a, **k)[0], None)
    )
    with pytest.raises(cs.CurvescopeError, match="expected the same outputs if attention is eager, not sdpa"):
        cs.load(module)


@pytest.mark.parametrize("used", [False, True])
def test_rwkv_is_the_model_as_trained_and_the_users_weights_stay(used: bool, tmp_path):
    """A pass in eval mode divides RWKV's weights in place; ours divides none, and takes them as they are."""
    module = cases.original("rwkv")
    trained = {name: p.detach().clone() for name, p in module.named_parameters()}
    module.save_pretrained(tmp_path / "saved")
    x, _ = cases.data("rwkv")
    with torch.no_grad():
        truth = cases.original("rwkv").train()(x, use_cache=False).logits.double()  # train mode: not rescaled
        own = module(x, use_cache=False).logits.double() if used else truth  # a norm's ε sees the halving
    handed = {name: p.detach().clone() for name, p in module.named_parameters()}
    halved = "rwkv.blocks.1.attention.output.weight"
    assert torch.equal(handed[halved], trained[halved] / (2 if used else 1))
    saved = cs.load(tmp_path / "saved", dtype="float64")
    for model, weights, outputs in ((cs.load(module), handed, own), (saved, trained, truth)):
        assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
        for _ in range(2):
            assert relative(model.forward({}, x).detach(), outputs) < 1e-6
    assert all(torch.equal(p, handed[name]) for name, p in module.named_parameters())
    assert module.config.rescale_every == 1


def test_fused_attention_has_no_second_derivative_and_ours_has():
    x, y = cases.data("gpt2")
    module = cases.original("gpt2", attention="sdpa")
    H = cs.Hessian(cs.Problem(module, (x, y))).block("L0.W_Q")
    v = torch.ones(H.shape[1], dtype=torch.float64)
    assert float((H @ v).abs().max()) > 0


def test_single_precision_by_default_and_device():
    model = cs.load(cases.folder_of("gpt2"), device="cpu")
    assert model.dtype == torch.float32
    assert model.name == "gpt2"
    assert not model.module.training
    assert any("dropout is switched off" in note for note in model.notes)


def test_padding_with_a_mask_changes_nothing():
    model = cases.loaded("gpt2")
    x, y = cases.data("gpt2", 2)
    padded = torch.cat([x, torch.zeros_like(x[:, :2])], dim=1)
    mask = torch.ones_like(padded)
    mask[:, 5:] = 0
    targets = torch.cat([y, torch.full_like(y[:, :2], -100)], dim=1)
    short = cs.Hessian(cs.Problem(model, (x, y))).block("L0.W_K")
    long = cs.Hessian(cs.Problem(model, ({"input_ids": padded, "attention_mask": mask}, targets))).block(
        "L0.W_K"
    )
    v = torch.randn(short.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert relative(long @ v, short @ v) < 1e-10


@pytest.mark.parametrize(
    ("name", "auto"),
    some(
        [
            ("gpt2", "AutoModel"),
            ("vit", "AutoModel"),
            ("roberta", "AutoModelForSequenceClassification"),
            ("llama", "AutoModelForSequenceClassification"),
            ("bert", "AutoModel"),
            ("bert", "AutoModelForSequenceClassification"),
            ("distilbert", "AutoModelForSequenceClassification"),
            ("opt", "AutoModelForSequenceClassification"),
        ],
        4,
    ),
)
def test_other_heads_of_the_same_body(name: str, auto: str, tmp_path):
    module = cases.original(name, auto=auto)
    module.save_pretrained(tmp_path / "other")
    model = cs.load(tmp_path / "other", dtype="float64")
    assert type(model.module) is type(module)
    check_cover(model.blocks, model.module)
    assert not set(model.blocks) & set(dict(model.named_parameters()))
    x, _ = cases.data(name)
    out = module(x)
    truth = getattr(out, "logits", None)
    truth = out.last_hidden_state if truth is None else truth
    assert relative(model.forward({}, x), truth) < 1e-5
    assert any("no head" in note for note in model.notes) == (auto == "AutoModel")


def test_an_unknown_family_is_its_parameters_with_a_hint(tmp_path):
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}
    config = transformers.CONFIG_MAPPING["gptj"](n_embd=8, n_layer=1, n_head=2, rotary_dim=2, vocab_size=11)
    cases.shaken(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(tmp_path / "j")
    model = cs.load(tmp_path / "j", dtype="float64")
    assert set(model.blocks) == set(dict(model.named_parameters()))
    check_cover(model.blocks, model.module)
    assert any("no table of roles for model_type 'gptj'" in note for note in model.notes)
    assert model.facts["n_layers"] == sizes["num_hidden_layers"]
    x, y = cases.data("gptj")
    H = cs.Hessian(cs.Problem(model, (x, y))).block("*q_proj*")
    assert torch.isfinite(H @ torch.ones(H.shape[1], dtype=torch.float64)).all()


# -------------------------------------------------------------------------------------------------- LoRA


class WithLora(nn.Module):
    """A linear layer with a low-rank addition, under the names that PEFT gives them."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_lora_is_a_selection():
    module = cases.original("llama", attention="eager")
    for layer in module.model.layers:
        layer.self_attn.q_proj = WithLora(layer.self_attn.q_proj)
    model = cs.load(cases.shaken(module.double()))
    check_cover(model.blocks, module)
    assert model.blocks["L0.W_Q"].parameter == "model.layers.0.self_attn.q_proj.base_layer.weight"
    space = model.space("*lora_*")
    assert len(space) == 4
    assert space.blocks[0].shape == (cases.D, 2)
    x, y = cases.data("llama")
    H = cs.Hessian(cs.Problem(model, (x, y))).block("*lora_*")
    truth, places = cases.dense_hessian(module, [b.parameter for b in space], x, y, exact=True)
    order = torch.cat([places[b.parameter].T.flatten() for b in space])
    assert relative(H @ torch.eye(space.size, dtype=torch.float64), truth[order][:, order]) < 1e-10
    assert set(capture(model, x, "L0.attn.*")) == {f"L0.attn.{p}" for p in ("in", "pattern", "heads", "out")}


# ---------------------------------------------------------------------------------------- TransformerLens


@pytest.mark.parametrize("variant", ["plain", "grouped"])
def test_hooked_transformer(variant: str):
    lens = pytest.importorskip("transformer_lens")
    more = (
        {"n_key_value_heads": 2, "gated_mlp": True, "normalization_type": "RMS"}
        if variant == "grouped"
        else {}
    )
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 4, "d_head": 3, "d_mlp": 10, "d_vocab": 11, "n_ctx": 8}
    config = lens.HookedTransformerConfig(**sizes, act_fn="gelu", seed=0, device="cpu", **more)
    with torch.random.fork_rng(devices=[]):
        module = cases.shaken(lens.HookedTransformer(config)).eval()
    model = cs.load(module, dtype="float64")
    assert next(module.parameters()).dtype == torch.float32
    assert module.cfg.dtype == torch.float32
    check_cover(model.blocks, model.module)
    assert not set(model.blocks) & set(dict(model.named_parameters()))
    x, y = cases.data("lens")
    assert relative(model.forward({}, x).float(), module(x)) < 1e-4
    assert model.blocks["L0.W_Q"].shape == (8, 12)
    own = dict(model.module.named_parameters())["blocks.0.attn.W_Q"]
    found = model.blocks["L0.W_Q"].take(own)
    assert torch.equal(found[:, 3:6], own[1])
    assert torch.equal(found[:, 3:6], model.heads["L0.h1.W_Q"].take(own))
    _check_hooked_layer(model, capture(model, x), 2 if variant == "grouped" else 4)
    H = cs.Hessian(cs.Problem(model, (x, y))).block(["L0.h1.W_Q", "L0.h1.W_V", "L1.h0.W_O"])
    assert relative(H @ torch.eye(H.shape[1], dtype=torch.float64), _hooked_hessian(model, x, y)) < 1e-10


def _check_hooked_layer(model: cs.Model, at: dict[str, torch.Tensor], kv: int) -> None:
    take = lambda name: model.blocks[name].take(model.get_parameter(model.blocks[name].parameter))  # noqa: E731
    V = (at["L0.attn.in"] @ take("L0.W_V") + take("L0.b_V")).unflatten(-1, (kv, 3)).transpose(1, 2)
    heads = at["L0.attn.pattern"] @ V.repeat_interleave(4 // kv, dim=1)
    torch.testing.assert_close(heads.transpose(1, 2).flatten(2), at["L0.attn.heads"])
    torch.testing.assert_close(at["L0.attn.heads"] @ take("L0.W_O") + take("L0.b_O"), at["L0.attn.out"])
    assert at["L1.ff.in"].shape == at["L1.ff.out"].shape == (3, 5, 8)


def _hooked_hessian(model: cs.Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Dense Hessian over raw 3-D parameters, the entries of the three heads picked by indexing."""
    own = dict(model.module.named_parameters())
    values = "blocks.0.attn._W_V" if "blocks.0.attn._W_V" in own else "blocks.0.attn.W_V"
    names = ["blocks.0.attn.W_Q", values, "blocks.1.attn.W_O"]
    theta = torch.cat([own[n].detach().flatten() for n in names])
    pieces = lambda t: dict(zip(names, t.split([own[n].numel() for n in names]), strict=True))  # noqa: E731

    def loss(theta: torch.Tensor) -> torch.Tensor:
        given = {n: t.view(own[n].shape) for n, t in pieces(theta).items()}
        z = torch.func.functional_call(model.module, given, (x,))
        return nn.functional.cross_entropy(z.reshape(-1, z.shape[-1]), y.flatten(), ignore_index=-100)

    numbers = {n: t.view(own[n].shape) for n, t in pieces(torch.arange(len(theta))).items()}
    order = [numbers[names[0]][1], numbers[names[1]][1], numbers[names[2]][0]]
    chosen = torch.cat([t.flatten() for t in order])
    return cases._hessian(loss, theta)[chosen][:, chosen]


# --------------------------------------------------------------------------------------- files and caches


def test_pickled_weights_load_without_running_code(tmp_path):
    module = cases.original("gpt2")
    module.config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {**json.loads((tmp_path / "config.json").read_text()), "architectures": ["GPT2LMHeadModel"]}
        )
    )
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    x, _ = cases.data("gpt2")
    torch.testing.assert_close(cs.load(tmp_path, dtype="float64").forward({}, x), module(x).logits)


def test_a_tokenizer_beside_the_model(tmp_path):
    import shutil

    folder = shutil.copytree(cases.folder_of("gpt2"), tmp_path / "with")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["[UNK]", "the", "cat", "sat", "on", "mat"])}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    model = cs.load(folder)
    assert model.tokenizer.encode("the cat sat") == [1, 2, 3]
    assert not any("no tokenizer" in note for note in model.notes)


def test_text_without_a_tokenizer_is_an_error_only_when_asked_for():
    with pytest.raises(cs.UsageError, match="tokenizer"):
        cs.text_data("sample", cases.loaded("gpt2"), tokens=8, seq_len=4)


def test_the_cache_is_used_without_a_network(tmp_path, monkeypatch):
    """A snapshot in the hub's own layout is found by its id and revision."""
    import shutil

    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(cases.folder_of("gpt2"), home / "snapshots" / commit)
    (home / "refs").mkdir()
    for ref in ("main", "step1000"):
        (home / "refs" / ref).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hf, "reachable", lambda: False)
    asked = []
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", lambda *a, **k: asked.append(a))
    x, _ = cases.data("gpt2")
    model = cs.load("someone/tiny", dtype="float64", revision="step1000")
    assert not asked
    assert model.name == "someone/tiny@step1000"
    torch.testing.assert_close(model.forward({}, x), cases.loaded("gpt2").forward({}, x))


def test_places_of_the_zoo_have_the_same_names():
    model = cs.load("tiny-gpt")
    x = torch.arange(6)[None]
    found = capture(model, x, "L1.*")
    assert set(found) == {
        f"L1.{p}" for p in ("attn.in", "attn.pattern", "attn.heads", "attn.out", "ff.in", "ff.out")
    }
    with pytest.raises(cs.UsageError, match=r"no place matches 'L9\.\*'"):
        capture(model, x, "L9.*")
    assert capture(model, x, "L0.attn.out", grad=True)["L0.attn.out"].requires_grad
    hf_model = cases.loaded("gpt2")
    ids, _ = cases.data("gpt2")
    assert capture(hf_model, ids, "L0.ff.in", grad=True)["L0.ff.in"].requires_grad
    assert not any(m._forward_hooks for m in hf_model.module.modules() if m is not hf_model.module)
