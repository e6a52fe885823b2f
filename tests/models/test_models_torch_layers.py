"""PyTorch's own Transformer layers: their roles, and products as plain double backward has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvescope as cs
import torch_layers as layers
from curvescope.kernels.function_mode import RULES, Substitute
from curvescope.models.model import check_cover
from selection import a_third, one_in, some

every = pytest.mark.parametrize("name", layers.CASES)


def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(x).flatten(0, 1), y.flatten())


def double_backward(module: nn.Module, x: Tensor, y: Tensor, v: dict[str, Tensor]) -> dict[str, Tensor]:
    """H v of the module itself, by nothing but autograd."""
    own = dict(module.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):
        g = torch.autograd.grad(loss(module, x, y), list(own.values()), create_graph=True, allow_unused=True)
        inner = sum((a * v[n]).sum() for a, n in zip(g, own, strict=True) if a is not None)
        found = torch.autograd.grad(inner, list(own.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if a is None else a for (n, p), a in zip(own.items(), found, strict=True)}


def close(found: Tensor, truth: Tensor) -> bool:
    return float((found - truth).norm() / truth.norm()) < 1e-10


@pytest.mark.parametrize("name", a_third(list(layers.CASES), shift=1))
def test_products_are_those_of_double_backward(name: str):
    module = layers.made(name)
    x, y = layers.data("padded" in name)
    H = cs.Hessian(cs.Problem(module, (x, y)), engine="fast")
    v = torch.randn(H.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth = H.space.gather(double_backward(module, x, y, H.space.scatter(v)))
    assert close(H @ v, truth)


@pytest.mark.parametrize("name", one_in(list(layers.CASES), 6, shift=0))
def test_outer_products_are_those_of_autograd(name: str):
    problem = cs.Problem(layers.made(name), layers.data("padded" in name))
    ours, theirs = (cs.GGN(problem, engine=engine) for engine in ("fast", "autograd"))
    v = torch.randn(ours.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert close(ours @ v, theirs @ v)


@every
def test_attention_is_fused_where_there_is_a_kernel(name: str, monkeypatch):
    taken = []
    rule = RULES[nn.functional.multi_head_attention_forward]

    def noting(*args, **kwargs):
        found = rule(*args, **kwargs)
        taken.append(found is not None)
        return found

    monkeypatch.setitem(RULES, nn.functional.multi_head_attention_forward, noting)
    x, _ = layers.data("padded" in name)
    module = layers.made(name)
    with Substitute():
        found = module(x)
    assert taken
    assert all(taken) == (name in layers.FUSED)
    torch.testing.assert_close(found, module(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("mask", [None, layers.CAUSAL, layers.ADDED], ids=["full", "causal", "added"])
def test_weights_are_those_of_pytorch(average: bool, mask: Tensor | None):
    attn = nn.MultiheadAttention(4, 2, batch_first=True).double()
    x = torch.randn(2, layers.T, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    padding = padding if mask is None or mask.dtype == torch.bool else torch.zeros(2, 5).double()
    call = {"attn_mask": mask, "key_padding_mask": padding, "average_attn_weights": average}
    with Substitute():
        ours = attn(x, x, x, **call)
    for a, b in zip(ours, attn(x, x, x, **call), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_values_and_gradients_are_of_one_function():
    """Without gradients PyTorch would give zeros at padded positions."""
    module = layers.made("encoder, padded")
    x, y = layers.data(padded=True)
    problem = cs.Problem(module, (x, y))
    assert problem.loss_value() == pytest.approx(float(loss(module, x, y).detach()), rel=1e-12)
    with torch.no_grad():
        assert float(loss(module, x, y)) != pytest.approx(problem.loss_value(), rel=1e-3)
    torch.testing.assert_close(problem.model.evaluate(x), module(x).detach(), rtol=0, atol=1e-12)


def test_a_padded_sequence_comes_first():
    """The engine asks the module on the first sequence, padding included."""
    module = layers.made("encoder, padded")
    x, y = (t.flip(0) for t in layers.data(padded=True))
    H = cs.Hessian(cs.Problem(module, (x, y)))
    v = torch.ones(H.shape[1], dtype=torch.float64)
    assert close(H @ v, H.space.gather(double_backward(module, x, y, H.space.scatter(v))))


@pytest.mark.parametrize("name", some(["encoder, padded", "decoder"], 1))
def test_layers_that_are_computed_again(name: str):
    problem = cs.Problem(layers.made(name), layers.data("padded" in name))
    H, again = cs.Hessian(problem), cs.Hessian(problem, checkpoint=True)
    v = torch.ones(H.shape[1], dtype=torch.float64)
    assert close(again @ v, H @ v)


def test_dropout_in_train_mode_is_switched_off_and_said():
    module = layers.made("encoder", train=True)
    with pytest.warns(UserWarning, match="dropout is switched off"):
        model = cs.load(module)
    x, y = layers.data()
    H = cs.Hessian(cs.Problem(model, (x, y)))
    v = torch.ones(H.shape[1], dtype=torch.float64)
    found = H @ v
    assert all(part.training for part in module.modules())
    assert close(found, H.space.gather(double_backward(module.eval(), x, y, H.space.scatter(v))))


def test_dropout_that_nobody_can_switch_off_is_refused():
    class Always(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.attn = nn.Embedding(layers.V, 4), nn.MultiheadAttention(4, 2)
            self.u = nn.Linear(4, layers.V)

        def forward(self, x: Tensor) -> Tensor:
            h, a = self.e(x).transpose(0, 1), self.attn
            y, _ = nn.functional.multi_head_attention_forward(
                h, h, h, 4, 2, a.in_proj_weight, a.in_proj_bias, None, None, False, 0.5,
                a.out_proj.weight, a.out_proj.bias, training=True,
            )  # fmt: skip
            return self.u(y.transpose(0, 1))

    H = cs.Hessian(cs.Problem(Always().double(), layers.data()))
    with pytest.raises(cs.CurvescopeError, match="gives different outputs"):
        H @ torch.ones(H.shape[1], dtype=torch.float64)


# ------------------------------------------------------------------------------------------------- roles

ATTENTION = {f"{x}_{y}" for x in "Wb" for y in "QKVO"}
LAYER = ATTENTION | {"W_1", "b_1", "W_2", "b_2", "ln1.g", "ln1.b", "ln2.g", "ln2.b"}
CROSS = {f"cross_{role}" for role in ATTENTION} | {"ln_cross.g", "ln_cross.b"}


def roles(model: cs.Model, layer: int) -> set[str]:
    return {n.removeprefix(f"L{layer}.") for n in model.blocks if n.startswith(f"L{layer}.")}


@every
def test_blocks_cover_every_parameter_once(name: str):
    model = cs.load(layers.made(name))
    check_cover(model.blocks, model.module)
    assert model.space().size == model.num_parameters


def test_roles_of_an_encoder():
    model = cs.load(layers.made("encoder"))
    assert roles(model, 0) == roles(model, 1) == LAYER
    assert {"ln_f.g", "ln_f.b", "e.weight", "u.weight"} <= set(model.blocks)
    facts = {
        key: model.facts[key] for key in ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff")
    }
    assert facts == {"n_layers": 2, "d_model": 4, "n_heads": 2, "n_kv_heads": 2, "d_head": 2, "d_ff": 6}


def test_roles_of_encoder_and_decoder():
    model = cs.load(layers.made("transformer"))
    assert roles(model, 0) == LAYER
    assert roles(model, 1) == LAYER | CROSS
    assert {"ln_enc.g", "ln_f.g"} <= set(model.blocks)
    assert any("L0 is body.encoder.layers.0" in note for note in model.notes)


def test_roles_of_a_block_of_ones_own():
    assert roles(cs.load(layers.made("own")), 0) == LAYER
    widths = cs.load(layers.made("own, other widths"))
    assert roles(widths, 0) == LAYER
    assert widths.blocks["L0.W_K"].shape == (3, 4)
    assert widths.blocks["L0.W_V"].shape == (2, 4)
    assert "attn.bias_k" in cs.load(layers.made("own, an extra key")).blocks


def test_several_attentions_in_one_block():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.cross_attn, self.third = (nn.MultiheadAttention(4, 2) for _ in range(3))

    model = cs.load(Two())
    assert roles(model, 0) == ATTENTION | {f"cross_{x}" for x in ATTENTION} | {
        f"third_{x}" for x in ATTENTION
    }
    model = cs.load(nn.ModuleList([nn.MultiheadAttention(4, 2) for _ in range(3)]))
    assert roles(model, 2) == ATTENTION


RAW = {
    "encoder": {
        "L1.W_Q": ("body.layers.1.self_attn.in_proj_weight", lambda n: n[:4].T),
        "L1.W_K": ("body.layers.1.self_attn.in_proj_weight", lambda n: n[4:8].T),
        "L1.h1.W_V": ("body.layers.1.self_attn.in_proj_weight", lambda n: n[10:].T),
        "L1.b_V": ("body.layers.1.self_attn.in_proj_bias", lambda n: n[8:]),
        "L1.h1.W_O": ("body.layers.1.self_attn.out_proj.weight", lambda n: n[:, 2:].T),
        "L0.W_1": ("body.layers.0.linear1.weight", lambda n: n.T),
    },
    "decoder": {
        "L0.h0.cross_W_Q": ("body.layers.0.multihead_attn.in_proj_weight", lambda n: n[:2].T),
        "L1.cross_W_V": ("body.layers.1.multihead_attn.in_proj_weight", lambda n: n[8:].T),
        "L1.W_K": ("body.layers.1.self_attn.in_proj_weight", lambda n: n[4:8].T),
        "L1.ln_cross.g": ("body.layers.1.norm2.weight", lambda n: n),
        "L1.ln2.g": ("body.layers.1.norm3.weight", lambda n: n),
    },
    "own, other widths": {
        "L0.h1.W_K": ("attn.k_proj_weight", lambda n: n[2:].T),
        "L0.b_V": ("attn.in_proj_bias", lambda n: n[8:]),
    },
}


@pytest.mark.parametrize("name", a_third(list(RAW), shift=0))
def test_blocks_are_slices_of_the_dense_hessian(name: str):
    module = layers.made(name)
    x, y = layers.data()
    H = cs.Hessian(cs.Problem(module, (x, y)))
    for block, (parameter, cut) in RAW[name].items():
        p = dict(module.named_parameters())[parameter]

        def restricted(values: Tensor, parameter: str = parameter) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                z = torch.func.functional_call(module, {parameter: values}, (x,))
            return nn.functional.cross_entropy(z.flatten(0, 1), y.flatten())

        dense = torch.autograd.functional.hessian(restricted, p.detach())
        own = cut(torch.arange(p.numel()).view(p.shape)).flatten()
        truth = dense.view(p.numel(), p.numel())[own][:, own]
        assert close(H.block(block).to_dense(), truth), block
