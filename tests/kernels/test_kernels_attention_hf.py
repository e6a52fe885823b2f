"""Hugging Face models with our attention against the same models with eager attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels_attention_plain import plain
from torch import Tensor

from curvescope.core.errors import CurvescopeError, ShapeError
from curvescope.kernels.attention import hf
from curvescope.kernels.attention.hf import hf_attention, hf_mask, register_hf
from selection import pairs

transformers = pytest.importorskip("transformers")
VOCABULARY, LENGTH = 19, 11
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON |= {"intermediate_size": 24, "max_position_embeddings": 32}
GROUPED = COMMON | {"num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "llama": ("Llama", GROUPED),
    "gpt_neox": ("GPTNeoX", COMMON),
    "bert": ("Bert", COMMON),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 8}),
    "qwen2_moe": (  # its layers do not pass the window on: the mask has to
        "Qwen2Moe",
        GROUPED | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
        | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 2}
        | {"num_experts_per_tok": 1},
    ),
    "gemma2": ("Gemma2", GROUPED | {"sliding_window": 4, "head_dim": 4}),  # soft caps
}  # fmt: skip
QUIET = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "hidden_dropout_prob": 0.0}
QUIET |= {"attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}


def build(name: str, attention: str, **more: Any) -> Any:
    register_hf()
    family, settings = MODELS[name]
    settings = settings | more
    settings = settings | QUIET | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**settings)
    config._experts_implementation = "eager"
    head = {"Bert": "ForMaskedLM", "GPT2": "LMHeadModel"}.get(family, "ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, family + head)._from_config(config, attn_implementation=attention)
        model = model.double().eval()
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.4)
    assert model.config._attn_implementation == attention
    return model


def batch(padding: str | None) -> tuple[Tensor, Tensor | None]:
    ids = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    if padding is None:
        return ids, None
    for row, count in enumerate((0, 4, 7)):
        mask[row, slice(LENGTH - count, None) if padding == "right" else slice(0, count)] = 0
    return ids, mask


def outputs(model: Any, padding: str | None) -> Tensor:
    """Logits at the real tokens."""
    ids, mask = batch(padding)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits if mask is not None else None
    if logits is None:
        return model(input_ids=ids).logits.flatten(0, 1)
    return logits[mask.bool()]


def product(model: Any, padding: str | None) -> list[Tensor]:
    """The Hessian of a loss of the logits times a fixed direction, parameter by parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    logits = outputs(model, padding)
    labels = torch.arange(len(logits)) % VOCABULARY
    loss = torch.nn.functional.cross_entropy(logits, labels)
    first = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    source = torch.Generator().manual_seed(2)
    v = [torch.randn(p.shape, generator=source, dtype=p.dtype) for p in parameters]
    return list(torch.autograd.grad(first, parameters, v, materialize_grads=True))


@pytest.fixture
def double(monkeypatch):
    """Eager attention takes its softmax in single precision, whatever it is given; here it does not."""
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: x.softmax(dim))


@pytest.mark.parametrize(("name", "padding"), pairs(list(MODELS), [None, "right", "left"]))
def test_logits_and_products_are_those_of_eager_attention(name, padding, double, monkeypatch):
    fallbacks = []
    plainly = hf._plain
    monkeypatch.setattr(hf, "_plain", lambda *a, **k: fallbacks.append(1) or plainly(*a, **k))
    ours, eager = build(name, "curvescope"), build(name, "eager")
    torch.testing.assert_close(outputs(ours, padding), outputs(eager, padding), rtol=0, atol=1e-10)
    assert bool(fallbacks) == (padding == "left" or name == "gemma2")
    found, expected = product(ours, padding), product(eager, padding)
    size = max(float(t.abs().max()) for t in expected)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9 * size)


@pytest.mark.parametrize(("name", "padding"), [("llama", "left"), ("mistral", "left"), ("mistral", "right")])
def test_queries_that_see_no_key_are_those_of_eager_attention(name, padding, double):
    """At padding, too, where a loss or a mean over positions might look."""
    more = {"sliding_window": 3} if name == "mistral" else {}
    ids, mask = batch(padding)
    ours, eager = (
        build(name, kind, **more)(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for kind in ("curvescope", "eager")
    )
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-10)


def heads(Hkv: int = 2) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 6, 3), (2, Hkv, 6, 3), (2, Hkv, 6, 5))
    return [torch.randn(s, generator=source, dtype=torch.float64) for s in shapes]


def test_masks_written_out():
    x = heads()
    layer: Any = SimpleNamespace(is_causal=True)
    seen = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    added = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    expected = plain(*x, causal=True).transpose(1, 2)
    for mask in (None, seen, added, torch.ones(2, 6)):
        torch.testing.assert_close(hf_attention(layer, *x, mask)[0], expected)
    full = hf_attention(layer, *x, None, is_causal=False)[0]
    torch.testing.assert_close(full, plain(*x).transpose(1, 2))


def test_queries_are_the_last_of_the_keys():
    q, k, v = heads()
    layer: Any = SimpleNamespace(is_causal=True)
    for window in (None, 2):
        expected = plain(q, k, v, causal=True, window=window).transpose(1, 2)
        for count in (1, 3):
            found = hf_attention(layer, q[:, :, -count:], k, v, None, sliding_window=window)[0]
            torch.testing.assert_close(found, expected[:, -count:])


def test_a_window_needs_causality():
    layer: Any = SimpleNamespace(is_causal=False)
    for keys in (None, torch.tensor([[0, 1, 1, 1, 1, 1]] * 2)):
        with pytest.raises(ShapeError, match="causal"):
            hf_attention(layer, *heads(), keys, sliding_window=2)


def test_gaps_in_the_keys_and_soft_caps():
    q, k, v = heads()
    layer: Any = SimpleNamespace(is_causal=False)
    keys = torch.tensor([[1, 0, 1, 1, 0, 1]] * 2)
    chosen = keys[0].bool()
    expected = plain(q, k[:, :, chosen], v[:, :, chosen]).transpose(1, 2)
    torch.testing.assert_close(hf_attention(layer, q, k, v, keys)[0], expected)
    capped = hf_attention(layer, q, k, v, None, softcap=1e6)[0]
    torch.testing.assert_close(capped, plain(q, k, v).transpose(1, 2), rtol=1e-6, atol=1e-8)
    assert not torch.allclose(hf_attention(layer, q, k, v, None, softcap=0.5)[0], capped)
    with pytest.raises(CurvescopeError, match="sinks"):
        hf_attention(layer, q, k, v, None, s_aux=torch.zeros(4))


def test_masks_of_whole_sequences_are_short():
    from transformers.masking_utils import (
        causal_mask_function,
        chunked_causal_mask_function,
        sliding_window_causal_mask_function,
    )

    size = {"batch_size": 2, "q_length": 6, "kv_length": 6, "q_offset": 0, "kv_offset": 0}
    assert hf_mask(**size, mask_function=causal_mask_function) is None
    sliding = hf_mask(**size, mask_function=sliding_window_causal_mask_function(3), local_size=3)
    assert sliding is not None
    assert sliding.shape == (2, 6)
    assert getattr(sliding, hf.WINDOW) == 3
    chunks = chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))
    assert hf_mask(**size, mask_function=chunks, local_size=3).shape == (2, 1, 6, 6)
    later = size | {"q_length": 2, "q_offset": 4}
    assert hf_mask(**later, mask_function=causal_mask_function).shape == (2, 1, 2, 6)
