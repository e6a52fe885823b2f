"""Weights kept in half precision: products are those of the float32 model with the same weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import curvescope as cs
from curvescope.core.errors import ShapeError, UsageError
from curvescope.studies.hvp.analysis import GPT2


def tokens(vocabulary=11, shape=(3, 8)):
    source = torch.Generator().manual_seed(0)
    return tuple(torch.randint(vocabulary, shape, generator=source) for _ in range(2))


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    return GPT2(3, 16, 2, 11, 8)


def unlayered() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 11))


def pair(build, kind=torch.bfloat16) -> tuple[nn.Module, nn.Module]:
    """The module in half precision, and the float32 one with its weights."""
    torch.manual_seed(0)
    half = build().eval().to(kind)
    return half, copy.deepcopy(half).float()


def near(a, b):
    assert float((a - b).norm()) <= 2e-6 * float(b.norm())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("build", [gpt2, llama, unlayered])
def test_products_are_those_of_the_wide_model(build, kind):
    half, wide = (cs.Problem(m, tokens()) for m in pair(build, kind))
    assert half.dtype == torch.float32
    assert half.model.get_parameter(next(iter(dict(half.model.named_parameters())))).dtype == kind
    assert half.loss_value() == pytest.approx(wide.loss_value(), rel=1e-6)
    near(half.gradient(), wide.gradient())
    V = torch.randn(wide.space().size, 2, generator=torch.Generator().manual_seed(1))
    for operator in (cs.Hessian, cs.GGN, cs.FunctionalHessian):
        near(operator(half) @ V, operator(wide) @ V)
        near(operator(half, engine="autograd") @ V, operator(wide, engine="autograd") @ V)


def test_blocks_and_other_batches():
    half, wide = pair(gpt2)
    x, y = tokens()
    whole, parts = cs.Problem(wide, (x, y)), cs.Problem(half, [(x[:1], y[:1]), (x[1:], y[1:])])
    H, K = cs.Hessian(parts, "h.1.c_attn.*"), cs.Hessian(whole, "h.1.c_attn.*")
    v = torch.randn(H.shape[1], generator=torch.Generator().manual_seed(1))
    near(H @ v, K @ v)


def test_weights_that_are_written_to_are_read_anew():
    half, wide = pair(gpt2)
    H, K = cs.Hessian(cs.Problem(half, tokens())), cs.Hessian(cs.Problem(wide, tokens()))
    v = torch.randn(H.shape[1], generator=torch.Generator().manual_seed(1))
    near(H @ v, K @ v)
    for module in (half, wide):
        with torch.no_grad():
            module.h[1].c_fc.weight.mul_(2)
    near(H @ v, K @ v)
    half.h[0].c_fc.weight.data[0] = 0.5
    wide.h[0].c_fc.weight.data[0] = 0.5
    near(H @ v, K @ v)
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in half.parameters())


def test_at_another_point():
    half, wide = pair(gpt2)
    name = "h.1.c_fc.weight"
    point = {name: torch.randn(wide.h[1].c_fc.weight.shape, generator=torch.Generator().manual_seed(2))}
    H, K = (cs.Hessian(cs.Problem(m, tokens()).at(point)) for m in (half, wide))
    v = torch.randn(H.shape[1], generator=torch.Generator().manual_seed(1))
    near(H @ v, K @ v)


def test_norms_in_float32_beside_weights_in_bfloat16():
    half, _ = pair(gpt2)
    for layer in half.h:
        layer.ln_1.float()
    wide = copy.deepcopy(half).float()
    H, K = cs.Hessian(cs.Problem(half, tokens())), cs.Hessian(cs.Problem(wide, tokens()))
    v = torch.randn(H.shape[1], generator=torch.Generator().manual_seed(1))
    near(H @ v, K @ v)


def test_frozen_weights():
    half, wide = pair(gpt2)
    for module in (half, wide):
        module.h[0].requires_grad_(False)
    H, K = cs.Hessian(cs.Problem(half, tokens())), cs.Hessian(cs.Problem(wide, tokens()))
    v = torch.randn(H.shape[1], generator=torch.Generator().manual_seed(1))
    near(H @ v, K @ v)
    assert not half.h[0].c_fc.weight.requires_grad


def test_it_is_said_once_and_another_type_is_another_model(monkeypatch, caplog):
    monkeypatch.setattr("curvescope.models.load._widening_logged", set())
    half, _ = pair(gpt2)
    with caplog.at_level("WARNING", logger="curvescope"):
        model = cs.load(half)
        cs.load(half)
    assert caplog.text.count("stored in bfloat16 and converted to float32 layer by layer") == 1
    assert any("converted to float32" in note for note in model.notes)
    assert cs.load(model) is model
    wide = cs.load(half, dtype="float64")
    assert wide.widening is None
    assert wide.dtype == torch.float64
    assert cs.load(model, dtype="float32").widening is None


def test_a_folder_is_widened_or_kept(tmp_path):
    half, _ = pair(llama)
    half.save_pretrained(tmp_path)
    wide, kept = cs.load(tmp_path), cs.load(tmp_path, dtype="bfloat16")
    assert next(wide.module.parameters()).dtype == torch.float32
    assert any("published in bfloat16 and converted to float32" in note for note in wide.notes)
    assert next(kept.module.parameters()).dtype == torch.bfloat16
    v = torch.randn(wide.num_parameters, generator=torch.Generator().manual_seed(1))
    near(cs.Hessian(cs.Problem(kept, tokens())) @ v, cs.Hessian(cs.Problem(wide, tokens())) @ v)


@pytest.mark.parametrize("asked", [lambda p: cs.Jacobian(p), lambda p: cs.KFAC(p)])
def test_what_is_not_made_for_it_says_so(asked):
    half, _ = pair(gpt2)
    with pytest.raises(UsageError, match="half precision"):
        asked(cs.Problem(half, tokens()))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def test_a_head_that_is_a_layer_itself():
    source = torch.Generator().manual_seed(0)
    data = torch.randn(4, 5, generator=source), torch.tensor([0, 1, 2, 0])
    half, wide = (cs.Problem(m, data) for m in pair(mlp))
    v = torch.randn(half.space().size, generator=source)
    for operator in (cs.Hessian, cs.GGN):
        near(operator(half) @ v, operator(wide) @ v)


class Shared(nn.Module):
    """A weight of a layer that the module uses outside of it, too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.between = nn.Linear(8, 8)
        self.between.weight = self.layers[1].weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(torch.tanh(self.between(x)))


def test_a_weight_of_a_layer_that_is_used_outside_of_it():
    half, wide = (cs.Problem(m, tokens()) for m in pair(Shared))
    v = torch.randn(half.space().size, generator=torch.Generator().manual_seed(1))
    near(half.gradient(), wide.gradient())
    near(cs.Hessian(half) @ v, cs.Hessian(wide) @ v)


def test_weights_that_are_read_elsewhere_are_refused():
    def decayed(model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
        return loss + 0.05 * sum(p.pow(4).sum() for p in model.parameters())

    data = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])
    half, _ = pair(mlp)
    problem = cs.Problem(half, [data], loss_fn=decayed)
    for asked in (problem.gradient, lambda: cs.Hessian(problem) @ torch.ones(problem.space().size)):
        with pytest.raises(UsageError, match="stores its weights in half precision"):
            asked()


def test_buffers_keep_their_precision():
    model = cs.load(llama().eval(), dtype="bfloat16")
    assert {b.dtype for b in model.module.buffers()} == {torch.float32}
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}


def test_a_problem_is_moved_to_weights_in_half_precision():
    half, wide = (cs.Problem(m, tokens()) for m in pair(gpt2))
    own = half.at({name: wide.get_parameter(name) * 2 for name in dict(wide.named_parameters())}).at(
        dict(half.model.named_parameters())
    )
    assert own.point == {}
    near(own.gradient(), wide.gradient())
    other = {name: (p * 1.5).detach() for name, p in half.model.named_parameters()}
    moved, truth = half.at(other), wide.at({name: p.float() for name, p in other.items()})
    v = torch.randn(wide.space().size, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        near(moved.gradient(), truth.gradient())
        near(cs.Hessian(moved) @ v, cs.Hessian(truth) @ v)
        near(cs.Hessian(half) @ v, cs.Hessian(wide) @ v)
    near(half.at(half.space().gather(other)).gradient(), truth.gradient())
    with pytest.raises(ShapeError, match=r"expected torch\.float32 on cpu, got torch\.float64"):
        half.at({name: p.double() for name, p in other.items()})
    with pytest.raises(ShapeError, match=r"expected torch\.float32 on cpu, got torch\.bfloat16"):
        wide.at(other)
