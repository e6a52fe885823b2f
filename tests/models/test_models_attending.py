"""Attention that is told to attend otherwise: a reference by hand, every engine, and all put back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvescope as cs
import oracles
from curvescope.models.capture import capture
from curvescope.models.running.attention_interventions import (
    UNCHANGED_ATTENTION,
    AttentionChange,
    changed_attention,
    patterns,
)
from selection import most, pairs

WAYS = {
    "bias": AttentionChange(bias=1.5),
    "key": AttentionChange(key=3.0),
    "extra": AttentionChange(extra=2.0),
    "gate": AttentionChange(gate=0.3),
    "first": AttentionChange(first=4.0),
    "all": AttentionChange(bias=-0.5, key=2.0, extra=0.7, gate=0.6, first=0.5),
}
IDS = torch.randint(0, 7, (2, 6), generator=torch.Generator().manual_seed(0))
DATA = IDS[:, :-1], IDS[:, 1:]


def by_hand(q: Tensor, k: Tensor, v: Tensor, how: AttentionChange, more: Tensor | float = 0.0) -> Tensor:
    """Causal attention (B, h, T, k) in the words of the formula; `more` is added to scores."""
    key = torch.ones(k.shape[2], dtype=k.dtype)
    key[0] = how.key
    S = q @ (key[:, None] * k).mT / math.sqrt(q.shape[-1]) + more
    S = S + how.bias * (torch.arange(k.shape[2]) == 0)
    E = S.exp().tril()
    return how.gate * (E / (how.extra + E.sum(-1, keepdim=True))) @ v


def zoo(**settings: Any) -> cs.Model:
    small = {"d_model": 4, "n_heads": 2, "d_ff": 5, "n_ctx": 6, "vocab_size": 7, "n_layers": 2}
    return cs.load(oracles.transformer(**{**small, **settings}))


def zoo_by_hand(module: Any, tokens: Tensor, how: AttentionChange) -> Tensor:
    x = module.embed(tokens)
    x = torch.cat([how.first * x[:, :1], x[:, 1:]], dim=1)
    for i in range(module.cfg.n_layers):
        layer = module.get_submodule(f"L{i}")
        y = layer.ln1(x)
        Q, K = layer.queries_and_keys(y)
        group = module.cfg.n_heads // module.cfg.kv_heads
        K, V = (t.repeat_interleave(group, 1) for t in (K, layer.values(y)))
        more = layer.score_bias(x.shape[1]) if module.cfg.score_bias != "none" else 0.0
        x = x + layer.project(by_hand(Q, K, V, how, more).transpose(1, 2).flatten(2))
        x = x + layer.feed_forward(layer.ln2(x), lambda *_: None)
    return module.ln_f(x) @ module.U


class Attention(nn.Module):
    """As nanoGPT writes it, with PyTorch's attention or a softmax."""

    def __init__(self, d: int, heads: int, how: str):
        super().__init__()
        self.c_attn, self.c_proj, self.n_head, self.how = nn.Linear(d, 3 * d), nn.Linear(d, d), heads, how

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        if self.how == "softmax":
            S = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf)
            y = F.softmax(S, dim=-1) @ v
        elif self.how == "mask":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class NanoGPT(nn.Module):
    """Two layers of attention alone."""

    def __init__(self, how: str = "causal"):
        super().__init__()
        self.wte, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.h = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), Attention(4, 2, how)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for layer in self.h:
            x = x + layer(x)
        return self.head(x)


def nano_by_hand(module: Any, ids: Tensor, how: AttentionChange) -> Tensor:
    x = module.wte(ids)
    for i, (norm, attention) in enumerate(module.h):
        read = torch.cat([how.first * x[:, :1], x[:, 1:]], dim=1) if i == 0 else x
        rows = attention.c_attn(norm(read)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in rows)
        x = x + attention.c_proj(by_hand(q, k, v, how).transpose(1, 2).flatten(2))
    return module.head(x)


def agrees_with_autograd(model: cs.Model, how: AttentionChange) -> None:
    problem = cs.Problem(model, DATA)
    v = torch.randn(model.num_parameters, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with changed_attention(model, how):
        for kind in (cs.Hessian, cs.GGN):
            torch.testing.assert_close(kind(problem) @ v, kind(problem, engine="autograd") @ v)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("settings", [{}, {"n_kv_heads": 1, "positions": "rope", "score_bias": "alibi"}])
def test_the_zoo_gives_what_the_formula_gives(how: str, settings: dict[str, Any]):
    model = zoo(**settings)
    with changed_attention(model, WAYS[how]):
        found = model.evaluate(IDS)
    torch.testing.assert_close(found, zoo_by_hand(model.module, IDS, WAYS[how]).detach())


@pytest.mark.parametrize("how", most(list(WAYS), but=["bias", "extra", "first"]))  # the engines' below
def test_curvature_is_that_of_the_formula(how: str):
    model = zoo(n_layers=1, d_model=2, d_ff=2, n_heads=1)
    problem = cs.Problem(model, DATA)
    module, names = model.module, list(dict(model.named_parameters()))
    own = [p.detach().clone() for p in model.parameters()]
    stacked = model.space().gather(dict(zip(names, own, strict=True)))

    def loss(flat: Tensor) -> Tensor:
        values = model.space().scatter(flat)
        z = torch.func.functional_call(
            ByHand(module, WAYS[how]), {f"module.{k}": w for k, w in values.items()}, DATA[0]
        )
        return F.cross_entropy(z.flatten(0, 1), DATA[1].flatten())

    dense = torch.autograd.functional.hessian(loss, stacked, vectorize=True)
    with changed_attention(model, WAYS[how]):
        torch.testing.assert_close(cs.Hessian(problem).to_dense(), dense)
        top = cs.eigsh(cs.Hessian(problem), 1, vectors=False).values[0]
    assert math.isclose(top, float(torch.linalg.eigvalsh(dense)[-1]), rel_tol=1e-8)


class ByHand(nn.Module):
    """The zoo's module, called by the formula."""

    def __init__(self, module: nn.Module, how: AttentionChange):
        super().__init__()
        self.module, self.how = module, how

    def forward(self, ids: Tensor) -> Tensor:
        return zoo_by_hand(self.module, ids, self.how)


@pytest.mark.parametrize("kind", ["causal", "mask", "softmax"])
def test_a_module_of_ones_own_is_reached(kind: str):
    torch.manual_seed(0)
    model = cs.load(NanoGPT(kind).double())
    for how in WAYS.values():
        with changed_attention(model, how):
            found = model.evaluate(IDS)
        torch.testing.assert_close(found, nano_by_hand(model.module, IDS, how).detach())
    agrees_with_autograd(model, WAYS["all"])


@pytest.mark.parametrize("how", ["bias", "extra", "first"])
def test_every_engine_sees_it_in_the_zoo(how: str):
    agrees_with_autograd(zoo(), WAYS[how])


@pytest.mark.parametrize(("family", "attention"), pairs(["gpt2", "llama"], ["eager", "sdpa"]))
@pytest.mark.filterwarnings("ignore:dropout")
def test_models_of_transformers_are_reached(family: str, attention: str):
    model = cs.load(hugging_face(family, attention))
    for how in [WAYS["all"]] + [WAYS["bias"]] * (attention == "sdpa"):
        P = patterns(model, IDS, how)
        assert len(P) == 2
        assert all(p.shape == (2, 2, 6, 6) for p in P)
        sums = P[0].sum(-1)
        assert bool((sums < 1).all()) if how.extra else torch.allclose(sums, torch.ones_like(sums))
        agrees_with_autograd(model, how)
    plain, moved = patterns(model, IDS)[0], patterns(model, IDS, AttentionChange(bias=2.0))[0]
    odds = (moved[..., 1:, 0] / (1 - moved[..., 1:, 0])) / (plain[..., 1:, 0] / (1 - plain[..., 1:, 0]))
    torch.testing.assert_close(odds, torch.full_like(odds, math.exp(2.0)))


def hugging_face(family: str, attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "gpt2":
        cfg = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=4, n_inner=4, vocab_size=7, n_positions=8, bos_token_id=0,
            eos_token_id=0, attn_implementation=attention,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(cfg).double()
    cfg = transformers.LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=4, intermediate_size=4,
        vocab_size=7, max_position_embeddings=8, attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(cfg).double()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_stream_of_a_single_layer_is_scaled_before_it(family: str):
    module = hugging_face(family, "eager").eval()
    layers = module.transformer.h if family == "gpt2" else module.model.layers
    del layers[1]
    module.config.num_hidden_layers = 1
    model = cs.load(module)
    with changed_attention(model, AttentionChange(first=3.0)):
        found = model.evaluate(IDS)

    def scaled(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return (torch.cat([3 * args[0][:, :1], args[0][:, 1:]], dim=1), *args[1:]), kwargs

    hook = layers[0].register_forward_pre_hook(scaled, with_kwargs=True)
    torch.testing.assert_close(found, model.evaluate(IDS))
    hook.remove()
    assert not torch.allclose(found, model.evaluate(IDS))


def test_as_it_is_changes_nothing():
    model = zoo()
    before = model.evaluate(IDS)
    with changed_attention(model, UNCHANGED_ATTENTION):
        assert not any("attend" in vars(part) for part in model.module.modules())
        assert torch.equal(model.evaluate(IDS), before)


def test_everything_is_put_back_in_any_order_and_after_errors():
    model = zoo()
    before, held = model.evaluate(IDS), [dict(vars(part)) for part in model.module.modules()]
    first, second = changed_attention(model, WAYS["bias"]), changed_attention(model, WAYS["gate"])
    first.__enter__()
    once = model.evaluate(IDS)
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.equal(model.evaluate(IDS), before)
    second.__exit__(None, None, None)
    assert torch.equal(model.evaluate(IDS), before)
    with pytest.raises(RuntimeError, match="ours"), changed_attention(model, WAYS["all"]):
        raise RuntimeError("ours")
    assert not torch.equal(once, before)
    assert torch.equal(model.evaluate(IDS), before)
    assert [dict(vars(part)) for part in model.module.modules()] == held


def test_patterns_are_weights_before_the_gate():
    model = zoo()
    own = capture(model, IDS, "L*.attn.pattern")
    for P, A in zip(patterns(model, IDS, AttentionChange(gate=0.2)), own.values(), strict=True):
        assert P.shape == A.shape
    assert torch.equal(patterns(model, IDS, AttentionChange(gate=0.2))[0], own["L0.attn.pattern"])


def test_attention_that_cannot_be_reached_is_said():
    linear = zoo(attention="linear")
    with pytest.raises(cs.UsageError, match="linear, without a softmax"):
        patterns(linear, IDS)
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True, dtype=torch.float64)
    encoder = cs.load(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    with pytest.raises(cs.UsageError, match="0 softmaxes over the scores of heads"):
        patterns(encoder, torch.randn(2, 3, 4, dtype=torch.float64))
    with pytest.raises(cs.UsageError, match="no part of it is known to be a layer"):
        patterns(cs.load(nn.Linear(2, 2)), torch.randn(2, 2))
    with pytest.raises(cs.UsageError, match="key > 0"):
        AttentionChange(key=0.0)
