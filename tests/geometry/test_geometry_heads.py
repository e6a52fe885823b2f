"""Heads of loaded models against the models' own attention, for every family; real GPT-2 spectra."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import curvescope as cs
from assets import ASSETS
from cases import transformer
from curvescope.core.errors import UsageError
from curvescope.geometry import check_heads, circuits, copying_score, heads
from curvescope.geometry.attention.energy import sphere_input
from curvescope.models.capture import capture
from selection import pairs, some

ZOO = {
    "biases": {},
    "no biases": {"bias_qkv": False, "bias_o": False, "bias_norm": False},
    "one head": {"n_heads": 1},
    "narrow, wide heads": {"d_model": 6, "n_heads": 2, "d_head": 8},
    "grouped": {"d_model": 8, "n_heads": 4, "n_kv_heads": 2},
    "rms rope grouped": {
        "norm_kind": "rmsnorm",
        "positions": "rope",
        "d_model": 8,
        "n_heads": 4,
        "n_kv_heads": 1,
        "d_head": 4,
    },
    "no affine, learned offsets": {"norm_affine": False, "score_bias": "learned"},
    "merged, alibi": {"merged_qk": True, "score_bias": "alibi", "positions": "none"},
    "both directions": {"causal": False},
    "linear": {"attention": "linear"},
    "post-norm": {"norm": "post"},
    "no norm": {"norm": "none"},
}
TOKENS = torch.tensor([[0, 3, 1, 4, 2], [2, 2, 0, 1, 4]])
FAMILIES = [
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "opt",
    "bert",
    "roberta",
    "distilbert",
    "vit",
]


def zoo(name: str) -> cs.Model:
    return cs.load(transformer(**{"n_layers": 2, **ZOO[name]}))


@pytest.mark.parametrize(("name", "folded"), pairs(list(ZOO), [True, False]))
def test_zoo_heads_are_the_models_own_attention(name, folded):
    model = zoo(name)
    for layer in (0, 1):
        found = check_heads(model, layer, TOKENS, folded=folded)
        assert found.pattern_error < 1e-12
        assert found.output_error < 1e-12
        assert found.folded == (folded and name not in ("post-norm", "no norm"))
        assert found.num_heads == model.facts["n_heads"]


@pytest.mark.parametrize("field", ["b_Q", "W_K"])
def test_the_check_notices_a_missing_matrix(monkeypatch, field):
    model = zoo("biases")
    import curvescope.geometry.attention.energy as module

    def wrong(*arguments, **options):
        found = heads(*arguments, **options)
        return [replace(c, **{field: 0 * getattr(c, field)}) for c in found]

    monkeypatch.setattr(module, "heads", wrong)
    found = module.check_heads(model, 0, TOKENS)
    assert found.pattern_error > 1e-3
    assert found.output_error > 1e-3


def test_grouped_heads_share_keys():
    own = heads(zoo("grouped"), 1)
    assert [c.kv_head for c in own] == [0, 0, 1, 1]
    assert [c.head for c in own] == [0, 1, 2, 3]
    assert torch.equal(own[0].W_K, own[1].W_K)
    assert torch.equal(own[2].W_V, own[3].W_V)
    assert not torch.equal(own[1].W_K, own[2].W_K)


def test_what_cannot_be_folded_says_so():
    for name, words in (("post-norm", "post-norm"), ("no norm", "no norm")):
        for layer in (0, 1):
            own = heads(zoo(name), layer)[0]
            assert not own.foldable
            assert not own.folded
            assert own.note.startswith("not foldable")
            assert words in own.note
    assert "L0.ln2" in heads(zoo("post-norm"), 1)[0].note
    own = heads(zoo("biases"), 0)[0]
    assert own.foldable
    assert own.note == ""


def test_heads_that_are_not_folded_are_the_raw_matrices():
    model = zoo("biases")
    raw = dict(model.module.named_parameters())
    h = model.facts["d_head"]
    for c in heads(model, 1, folded=False):
        own = slice(c.head * h, (c.head + 1) * h)
        dense = raw["L1.W_Q"][:, own] @ raw["L1.W_K"][:, own].T / h**0.5
        torch.testing.assert_close(c.qk.to_dense(), dense.detach(), rtol=0, atol=1e-14)
        dense = raw["L1.W_V"][:, own] @ raw["L1.W_O"][own]
        torch.testing.assert_close(c.vo.to_dense(), dense.detach(), rtol=0, atol=1e-14)


def test_the_layers_sum_is_attention_on_one_token():
    for name in ("biases", "grouped", "rms rope grouped"):
        model = zoo(name)
        for layer in (0, 1):
            places = (f"L{layer}.attn.in", f"L{layer}.attn.out")
            x, out = (capture(model, TOKENS[:1, :1], *places)[p][0] for p in places)
            own = heads(model, layer)
            n = sphere_input(model, layer, x)
            total = sum(c.values(n) for c in own) + own[0].b_O
            torch.testing.assert_close(total, out, rtol=0, atol=1e-12)


def test_bad_layers_and_models_are_refused():
    with pytest.raises(UsageError, match="0 to 1"):
        heads(zoo("biases"), 2)
    with pytest.raises(UsageError, match="attention heads"):
        heads(cs.load(torch.nn.Linear(3, 3)), 0)


# ---------------------------------------------------------------------------------- models from elsewhere


@pytest.mark.parametrize(("name", "first"), pairs(FAMILIES, [True, False], shift=1, every=3))
def test_every_family(name, first):
    """Folded in one of two layers; what a family does in float32 is done in float64 here."""
    pytest.importorskip("transformers")
    import adapters_cases as others

    model, (x, _) = cs.load(others.original(name)), others.data(name)
    for layer, folded in enumerate((first, not first)):
        with others.KeepDouble():
            found = check_heads(model, layer, x, folded=folded)
        assert found.pattern_error < 1e-12
        assert found.output_error < 1e-12
        assert found.folded == (folded and name not in ("bert", "roberta", "distilbert"))


def test_notes_of_families():
    pytest.importorskip("transformers")
    import adapters_cases as others

    def note(name: str) -> str:
        return heads(others.loaded(name), 0)[0].note

    assert "queries and keys" in note("qwen3")
    assert "tanh" in note("gemma2")
    assert "norm follows attention" in note("gemma2")
    assert "read the same stream" in note("gpt_neox")
    assert "rotary" in note("llama")
    assert "ln_e" in note("bert")


@pytest.mark.parametrize("variant", ["plain", "grouped", "folded", "adjacent"])
def test_transformer_lens(variant):
    lens = pytest.importorskip("transformer_lens")
    import adapters_cases as others

    more = {
        "plain": {},
        "grouped": {"n_key_value_heads": 2, "normalization_type": "RMS"},
        "folded": {"positional_embedding_type": "rotary", "rotary_dim": 2, "normalization_type": "LNPre"},
        "adjacent": {
            "positional_embedding_type": "rotary",
            "rotary_dim": 4,
            "rotary_adjacent_pairs": True,
            "normalization_type": "LN",
        },
    }[variant]
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 4, "d_head": 4, "d_mlp": 10, "d_vocab": 11, "n_ctx": 8}
    config = lens.HookedTransformerConfig(
        **sizes, act_fn="gelu", seed=0, device="cpu", dtype=torch.float64, **more
    )
    with torch.random.fork_rng(devices=[]):
        module = others.shaken(lens.HookedTransformer(config)).eval()
    found = check_heads(cs.load(module, dtype="float64"), 1, others.data("lens")[0])
    assert found.folded
    assert found.pattern_error < 1e-12
    assert found.output_error < 1e-12


def test_nanogpt(tmp_path):
    d, V = 8, 7
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return 0.4 * torch.randn(*shape, generator=source)

    weights = {"transformer.wte.weight": draw(V, d), "transformer.wpe.weight": draw(6, d)}
    for name, shape in {
        "ln_1.weight": (d,),
        "attn.c_attn.weight": (3 * d, d),
        "attn.c_proj.weight": (d, d),
        "ln_2.weight": (d,),
        "mlp.c_fc.weight": (4 * d, d),
        "mlp.c_proj.weight": (d, 4 * d),
    }.items():
        weights[f"transformer.h.0.{name}"] = draw(*shape)
        weights[f"transformer.h.0.{name.replace('weight', 'bias')}"] = draw(shape[0])
    weights |= {"transformer.ln_f.weight": draw(d), "transformer.ln_f.bias": draw(d)}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    args = {"n_layer": 1, "n_head": 2, "n_embd": d, "block_size": 6, "vocab_size": V, "bias": True}
    torch.save({"model": weights, "model_args": args}, tmp_path / "ckpt.pt")
    model = cs.load(tmp_path, dtype="float64")
    found = check_heads(model, 0, torch.tensor([[1, 5, 2, 0]]))
    assert found.folded
    assert max(found.pattern_error, found.output_error) < 1e-12
    W = weights["transformer.h.0.attn.c_attn.weight"].double()
    dense = W[4:8].T @ W[d + 4 : d + 8] / 2  # head 1, by nanoGPT's own layout
    torch.testing.assert_close(heads(model, 0, folded=False)[1].qk.to_dense(), dense)


# ------------------------------------------------------------------------------------------- real GPT-2


@pytest.fixture(scope="module")
def gpt2() -> tuple[dict[str, torch.Tensor], dict]:
    weights = ASSETS / "gpt2-attention" / "blocks_0_5.safetensors"
    reference = ASSETS.parent / "reference" / "gpt2_reference.json"
    if not weights.exists() or not reference.exists():
        pytest.skip("no weights of GPT-2 here; set CURVESCOPE_ASSETS")
    from safetensors.torch import load_file

    return load_file(weights), json.loads(reference.read_text())


@pytest.mark.parametrize("block", some([0, 5], 1))
def test_spectra_of_real_gpt2(gpt2, block):
    """Singular values to four decimals, raw and folded; coverage, norms, copying scores, bias shares."""
    w, reference = gpt2
    at = f"h.{block}."
    W, b = w[f"{at}attn.c_attn.weight"], w[f"{at}attn.c_attn.bias"]
    gamma, beta = w[f"{at}ln_1.weight"], w[f"{at}ln_1.bias"]
    for want in reference["blocks"][str(block)]["heads"]:
        own = slice(64 * want["head"], 64 * want["head"] + 64)
        parts = {f"W_{x}": W[:, 768 * i : 768 * (i + 1)][:, own] for i, x in enumerate("QKV")}
        parts |= {f"b_{x}": b[768 * i : 768 * (i + 1)][own] for i, x in enumerate("QKV")}
        parts |= {"W_O": w[f"{at}attn.c_proj.weight"][own], "gamma": gamma, "beta": beta}
        raw, folded = circuits(**parts, folded=False), circuits(**parts)
        for found, key in (
            (raw.qk, "qk"),
            (raw.vo, "vo"),
            (folded.qk, "qk_folded"),
            (folded.vo, "vo_folded"),
        ):
            values = torch.tensor(want[key], dtype=torch.float64)
            assert found.rank == 64
            assert float((found.singular_values[: len(values)] - values).abs().max()) < 5.1e-5
        assert raw.qk.frobenius == pytest.approx(want["qk_fro"], abs=6e-5)
        assert raw.vo.frobenius == pytest.approx(want["vo_fro"], abs=6e-5)
        assert raw.qk.num_for(0.99, energy=False) == want["idx99_qk"] + 1
        assert raw.vo.num_for(0.99, energy=False) == want["idx99_vo"] + 1
        assert copying_score(raw.vo) == pytest.approx(want["ov_eig_score"], abs=6e-5)
        assert folded.bias_share() == pytest.approx(want["share_const"], abs=1e-3)
        assert folded.bias_share(parts["b_Q"].double()) == pytest.approx(want["share_bq"], abs=1e-3)


def test_a_real_block_through_a_model(gpt2):
    """The same heads when the weights sit in a GPT-2 of transformers, and its own attention."""
    transformers = pytest.importorskip("transformers")
    w, reference = gpt2
    config = transformers.GPT2Config(n_layer=1, vocab_size=16, n_positions=8, attn_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        module = transformers.GPT2LMHeadModel(config).double().eval()
    own = {
        name.removeprefix("h.0."): tensor.double() for name, tensor in w.items() if name.startswith("h.0.")
    }
    module.transformer.h[0].load_state_dict(own, strict=False)
    model = cs.load(module)
    for circuit, want in zip(heads(model, 0), reference["blocks"]["0"]["heads"], strict=True):
        for found, key in ((circuit.qk, "qk_folded"), (circuit.vo, "vo_folded")):
            values = torch.tensor(want[key], dtype=torch.float64)
            assert float((found.singular_values[: len(values)] - values).abs().max()) < 5.1e-5
    found = check_heads(model, 0, torch.tensor([[1, 5, 2, 9]]))
    assert max(found.pattern_error, found.output_error) < 1e-12
