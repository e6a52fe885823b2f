"""`cs.load(module, roles=…)`: blocks of a module of one's own, and what is said of wrong ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
from curvescope.models.model import check_cover

V, D, H, G, K = 5, 4, 2, 1, 2  # vocabulary, width, heads, heads of keys and values, their size


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(D, (H + 2 * G) * K)
        self.out = nn.Linear(H * K, D, bias=False)
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.fused(x).split([H * K, G * K, G * K], dim=-1)
        q, k, v = (t.view(B, T, -1, K).transpose(1, 2) for t in (q, k, v))
        y = (q @ k.mT).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2)) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.parts, self.read = (
            nn.Embedding(V, D),
            nn.ModuleList([Layer(), Layer()]),
            nn.Linear(D, V),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x)
        for part in self.parts:
            h = part(h)
        return self.read(h)


ROLES = {
    "E": "tok.weight",
    "L{layer}.W_QKV": "parts.{layer}.fused.weight",
    "L{layer}.b_QKV": "parts.{layer}.fused.bias",
    "L{layer}.W_O": "parts.{layer}.out.weight",
    "U": "read.weight",
    "n_heads": H,
    "n_kv_heads": G,
}
X, Y = torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[1, 2, 3], [4, 0, 1]])


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double()


def test_blocks_heads_and_facts():
    model = cs.load(net(), roles=ROLES)
    check_cover(model.blocks, model.module)
    layer = {"W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "W_O"}
    assert {n.removeprefix("L1.") for n in model.blocks if n.startswith("L1.")} == layer
    assert {"E", "U", "read.bias", "parts.0.scale"} <= set(model.blocks)
    assert [n for n in model.heads if n.startswith("L0.") and n.endswith("W_Q")] == ["L0.h0.W_Q", "L0.h1.W_Q"]
    assert [n for n in model.heads if n.startswith("L0.") and n.endswith("W_K")] == ["L0.h0.W_K"]
    p = model.get_parameter("parts.0.fused.weight")
    assert torch.equal(model.heads["L0.h1.W_Q"].take(p), p[2:4].T)
    assert torch.equal(model.blocks["L0.W_V"].take(p), p[6:].T)
    expected = {"n_layers": 2, "n_heads": H, "n_kv_heads": G, "d_head": K, "d_model": D}
    assert expected.items() <= model.facts.items()


def test_products_are_slices_of_the_dense_hessian():
    module = net()
    model = cs.load(module, roles=ROLES)
    name = "parts.1.fused.weight"
    p = model.get_parameter(name)

    def loss(values: Tensor) -> Tensor:
        z = torch.func.functional_call(module, {name: values}, (X,))
        return nn.functional.cross_entropy(z.flatten(0, 1), Y.flatten())

    dense = torch.autograd.functional.hessian(loss, p.detach()).view(p.numel(), -1)
    own = torch.arange(p.numel()).view(p.shape)[4:6].T.flatten()
    found = cs.Hessian(cs.Problem(model, (X, Y))).block("L1.W_K").to_dense()
    torch.testing.assert_close(found, dense[own][:, own], rtol=1e-10, atol=1e-14)


def test_other_orders_layouts_and_axes():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv, self.mixed = nn.Linear(D, 2 * H * K), nn.Linear(D, 3 * H * K)
            self.q, self.o = nn.Parameter(torch.randn(H, D, K)), nn.Parameter(torch.randn(H * K, D))
            self.gate_up = nn.Linear(D, 6, bias=False)

    module = Odd()
    roles = {
        "L0.W_VK": "kv.weight",
        "L0.W_Q": ("q", "h i k"),
        "L0.W_O": "o",
        "L0.W_gu": "gate_up.weight",
        "n_heads": H,
    }
    model = cs.load(module, roles=roles)
    check_cover(model.blocks, module)
    assert torch.equal(model.heads["L0.h1.W_K"].take(module.kv.weight), module.kv.weight[6:].T)
    assert torch.equal(model.heads["L0.h1.W_Q"].take(module.q), module.q[1])
    assert torch.equal(model.heads["L0.h1.W_O"].take(module.o), module.o[2:])
    assert torch.equal(model.blocks["L0.W_u"].take(module.gate_up.weight), module.gate_up.weight[3:].T)
    mixed = cs.load(module, roles={"L0.W_QKV": "mixed.weight", "n_heads": H, "packed": "per head"})
    assert torch.equal(mixed.heads["L0.h1.W_K"].take(module.mixed.weight), module.mixed.weight[8:10].T)


def test_without_heads_packed_matrices_are_thirds():
    module = nn.Sequential(nn.Linear(D, 12))
    model = cs.load(module, roles={"W_QKV": "0.weight"})
    assert torch.equal(model.blocks["W_K"].take(module[0].weight), module[0].weight[4:8].T)
    assert not model.heads


def test_layers_count_from_zero():
    module = nn.Sequential(nn.Tanh(), nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    model = cs.load(module, roles={"L{layer}.W_1": "{layer}.weight"})
    assert model.blocks["L1.W_1"].parameter == "3.weight"


def test_roles_that_structure_found_stay():
    module = nn.ModuleDict({"tok": nn.Embedding(V, D), "attn": nn.MultiheadAttention(D, H)})
    model = cs.load(module, roles={"E": "tok.weight"})
    assert {"E", "L0.W_Q", "L0.b_O"} <= set(model.blocks)
    assert "L0.h1.W_Q" in model.heads


WRONG = {
    "no such parameter": (
        {"L{layer}.W_Q": "parts.{layer}.fuse.weight"},
        r"no parameter is called 'parts\.\{layer\}\.fuse\.weight', .*did you mean 'parts\.\{layer\}\.fused",
    ),
    "a layer in one": ({"W_Q": "parts.{layer}.fused.weight"}, r"expected \{layer\} in both or in neither"),
    "two roles": (
        {"L{layer}.W_Q": "parts.{layer}.out.weight", "L0.W_O": "parts.0.out.weight"},
        r"expected one role for every parameter, but 'parts\.0\.out\.weight' has",
    ),
    "two parameters": (
        {"L{layer}.W_Q": "parts.{layer}.out.weight", "L0.W_QKV": "parts.0.fused.weight"},
        r"two parameters have the role 'L0\.W_Q': parts\.0\.out\.weight and parts\.0\.fused\.weight",
    ),
    "unknown axes": ({"E": ("tok.weight", "v d")}, r"letters i, o, h, k and 1 for the role 'E', got 'v d'"),
    "an axis twice": ({"E": ("tok.weight", "o o")}, "expected axes, each once, .* got 'o o'"),
    "groups that no head can have": (
        {**ROLES, "n_kv_heads": 3},
        "expected n_heads to be a multiple of n_kv_heads, got 2 and 3",
    ),
    "another matrix": (
        {"L1.W_V": "read.weight", "L1.W_O": "parts.1.out.weight", "n_heads": 1},
        r"expected heads of one size in L1\.W_V and L1\.W_O, got 5 and 4",
    ),
    "axes of others": (
        {"L0.W_Q": ("parts.0.out.weight", "h i k"), "n_heads": 2},
        r"expected 'parts\.0\.out\.weight' to be cut as 'h i k'",
    ),
    "an unknown setting": ({"n_head": 2}, r"the role 'n_head', got 2 \(did you mean 'n_heads'"),
    "no heads": ({"n_heads": 0}, r"expected n_heads of at least 1, got 0"),
    "heads that do not fit": (
        {"L{layer}.W_O": "parts.{layer}.out.weight", "n_heads": 3},
        r"'parts\.0\.out\.weight' .* for 3 heads \(n_heads=3\), but it has 4 inputs",
    ),
    "more heads than outputs": (
        {"L{layer}.W_Q": "parts.{layer}.fused.weight", "n_heads": 16},
        r"'parts\.0\.fused\.weight' .* for 16 heads \(n_heads=16\), but it has 8 outputs",
    ),
    "heads of keys that do not fit": (
        {"L{layer}.W_K": "parts.{layer}.fused.weight", "n_heads": 6, "n_kv_heads": 3},
        r"for 3 heads \(n_heads=6, n_kv_heads=3\), but it has 8 outputs",
    ),
    "packed heads that do not fit": (
        {"L{layer}.W_QKV": "parts.{layer}.fused.weight", "n_heads": 3},
        r"for 9 heads \(n_heads=3, packed\), but it has 8 outputs",
    ),
    "thirds of eight": (
        {"L{layer}.b_QKV": "parts.{layer}.fused.bias"},
        r"'parts\.0\.fused\.bias' .* for 3 of Q, K and V, but it has 8 outputs",
    ),
    "an unknown order": ({"packed": "mixed"}, r"expected packed to be 'stacked' or 'per head', got 'mixed'"),
    "per head of nothing": ({"packed": "per head"}, "needs n_heads"),
    "no dictionary": (["W_Q"], "expected roles as a dictionary, got a list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_roles_are_one_sentence(name: str):
    roles, message = WRONG[name]
    with pytest.raises(cs.UsageError, match=message) as caught:
        cs.load(net(), roles=roles)
    assert "\n" not in str(caught.value)
