"""Roles of hand-written Transformers: found by the names of linear layers if there is one reading."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvescope as cs
from curvescope.models.model import check_cover

V, D, H, F, T = 5, 8, 2, 6, 4


def attend(q: Tensor, k: Tensor, v: Tensor, h: int, *, causal: bool = True, mixed: bool = False) -> Tensor:
    """Attention of (B, T, h k); `mixed` is the layout in which the head is the fastest index."""
    g = h * k.shape[-1] // q.shape[-1]

    def split(t: Tensor, n: int) -> Tensor:
        return t.unflatten(-1, (-1, n)).movedim(-1, 1) if mixed else t.unflatten(-1, (n, -1)).transpose(1, 2)

    q, k, v = split(q, h), split(k, g), split(v, g)
    k, v = (t.repeat_interleave(h // g, 1) for t in (k, v))
    s = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    y = s.softmax(-1) @ v
    return y.movedim(1, -1).flatten(2) if mixed else y.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Separate projections under given names; `swap` uses the third as keys and the second as queries."""

    def __init__(
        self,
        names: str,
        *,
        heads: str = "n_head",
        kv: int = D,
        bias: bool = True,
        swap: bool = False,
        **how: Any,
    ):
        super().__init__()
        self.names, self.how, self.swap = names.split(), how, swap
        if heads:
            setattr(self, heads, H)
        widths = (D, kv, kv, D)
        for name, width in zip(self.names, widths, strict=True):
            setattr(self, name, nn.Linear(D, width, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, out = (getattr(self, name) for name in self.names)
        q, k = (k, q) if self.swap else (q, k)
        return out(attend(q(x), k(x), v(x), H, **self.how))


class Packed(nn.Module):
    def __init__(self, names: str, order: str = "QKV", *, per_head: bool = False):
        super().__init__()
        self.names, self.order, self.per_head, self.num_heads = names.split(), order, per_head, H
        for name, width in zip(self.names, (3 * D, D), strict=True):
            setattr(self, name, nn.Linear(D, width))

    def forward(self, x: Tensor) -> Tensor:
        z = getattr(self, self.names[0])(x)
        if self.per_head:
            z = z.unflatten(-1, (H, 3, -1)).transpose(2, 3).flatten(2)
        parts = dict(zip(self.order, z.chunk(3, -1), strict=True))
        return getattr(self, self.names[1])(attend(parts["Q"], parts["K"], parts["V"], H))


class WithMask(Attention):
    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class WithTable(Attention):
    """It cannot be run without a table of rotations."""

    def forward(self, x: Tensor, rotations: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x * rotations["x"])


class Cross(Attention):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v, out = (getattr(self, name) for name in self.names)
        return out(attend(q(x), k(context), v(context), H))


class Block(nn.Module):
    def __init__(self, attn: nn.Module, ff: nn.Module, more: tuple[Any, ...] = ()):
        super().__init__()
        self.attn, self.more = attn, more
        self.norm1, self.norm2, self.ff = nn.LayerNorm(D), nn.LayerNorm(D), ff

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), *self.more)
        return x + self.ff(self.norm2(x))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, F), nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class GPT(nn.Module):
    def __init__(self, make: Any, num_layers: int = 2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList([make() for _ in range(num_layers)])
        self.ln_f, self.lm_head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.lm_head(self.ln_f(h))


class OneClass(nn.Module):
    """Attention and feed-forward network in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = H, nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(D, F), nn.Linear(F, D)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        x = x + self.o(attend(self.q(n), self.k(n), self.v(n), H))
        return x + self.fc2(self.fc1(self.norm2(x)).tanh())


def plain_ff() -> nn.Module:
    return nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))


def made(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double().eval()


class PackedBlock(nn.Module):
    """All linear layers in the block itself: packed projection, output, and a feed-forward network."""

    def __init__(self, names: str):
        super().__init__()
        self.names, self.n_head = names.split(), H
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        for name, before, after in zip(self.names, (D, D, D, F), (3 * D, D, F, D), strict=True):
            self.add_module(name, nn.Linear(before, after))

    def forward(self, x: Tensor) -> Tensor:
        packed, out, first, second = (getattr(self, name) for name in self.names)
        x = x + out(attend(*packed(self.norm1(x)).chunk(3, -1), H))
        return x + second(first(self.norm2(x)).tanh())


LLAMA, ROLES = "q_proj k_proj v_proj o_proj", {"W_Q", "W_K", "W_V", "W_O"}
FOUND: dict[str, Any] = {
    "q_proj": lambda: GPT(lambda: Block(Attention(LLAMA, bias=False), plain_ff())),
    "wq, gated": lambda: GPT(lambda: Block(Attention("wq wk wv wo", heads="n_heads"), Gated())),
    "query": lambda: GPT(lambda: Block(Attention("query key value dense", causal=False), plain_ff())),
    "W_Q, mask": lambda: GPT(lambda: Block(WithMask("W_Q W_K W_V W_O"), plain_ff(), (None,))),
    "grouped": lambda: GPT(lambda: Block(Attention("to_q to_k to_v to_out", kv=4), plain_ff())),
    "one class": lambda: GPT(OneClass),
    "packed": lambda: GPT(lambda: Block(Packed("c_attn c_proj"), plain_ff())),
    "packed per head": lambda: GPT(lambda: Block(Packed("to_qkv to_out", per_head=True), plain_ff())),
    "packed, two names of an output": lambda: GPT(lambda: PackedBlock("qkv proj fc1 fc_out")),
    "packed, unknown output": lambda: GPT(lambda: PackedBlock("Wqkv attn_back up down")),
    "packed, unusual names": lambda: GPT(lambda: PackedBlock("mixer back first second")),
}


UNKNOWN_FEED_FORWARD = ("packed, two names of an output", "packed, unusual names")


def dense_hessian(module: nn.Module, parameter: str, x: Tensor, y: Tensor) -> Tensor:
    p = module.get_parameter(parameter)
    z = module(x)
    value = nn.functional.cross_entropy(z.flatten(0, 1), y.flatten())
    (g,) = torch.autograd.grad(value, p, create_graph=True)
    rows = [torch.autograd.grad(e, p, retain_graph=True)[0].flatten() for e in g.flatten()]
    return torch.stack(rows)


def rows_of(name: str, role: str, head: int) -> slice:
    """Rows of a head in the projection that holds its role."""
    k = D // H
    if name.startswith("packed"):
        i = "QKV".index(role)
        start = (3 * head + i) * k if "per head" in name else i * D + head * k
    else:
        start = head * k if role == "Q" or name != "grouped" else 0
    return slice(start, start + k)


@pytest.mark.parametrize("name", FOUND)
def test_roles_are_found_and_are_slices_of_the_dense_hessian(name: str):
    module = made(FOUND[name])
    model = cs.load(module)
    check_cover(model.blocks, module)
    assert {f"L{i}.{role}" for i in (0, 1) for role in ROLES} <= set(model.blocks)
    assert {"E", "P", "U", "ln_f.g", "L0.ln1.g"} <= set(model.blocks)
    assert ("L1.W_2" in model.blocks) == (name not in UNKNOWN_FEED_FORWARD)
    assert ("L0.W_g" in model.blocks) == ("gated" in name)
    assert model.facts["n_heads"] == H
    assert any("roles=" in note for note in model.notes)
    x = torch.tensor([[0, 1, 2, 3], [3, 4, 0, 1]])
    H_ = cs.Hessian(cs.Problem(model, (x, x.roll(1, 1))))
    for role in "QKV":
        head = 0 if name == "grouped" and role != "Q" else 1
        block = model.heads[f"L1.h{head}.W_{role}"]
        rows = rows_of(name, role, head)
        p = module.get_parameter(block.parameter)
        assert torch.equal(block.take(p), p[rows].T)
        own = torch.arange(p.numel()).view(p.shape)[rows].T.flatten()
        truth = dense_hessian(module, block.parameter, x, x.roll(1, 1))[own][:, own]
        found = H_.block(block.name).to_dense()
        assert float((found - truth).norm()) < 1e-10 * float(truth.norm()) + 1e-14


def test_names_of_parameters_still_select_blocks():
    model = cs.load(made(FOUND["q_proj"]))
    assert [b.name for b in model.space("tok.weight")] == ["E"]
    assert [b.name for b in model.space("blocks.0.attn.q_proj.weight")] == ["L0.W_Q"]
    assert len(model.space("blocks.1.*")) == len(model.space("L1.*"))
    first = cs.load(nn.ModuleDict({"odd": nn.Linear(2, 2), "attn": nn.MultiheadAttention(4, 2)}))
    assert {b.parameter for b in first.space("*weight")} == {
        n for n, _ in first.module.named_parameters() if n.endswith("weight")
    }


class Lone(nn.Module):
    """A linear layer called q that is not part of an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.q(x))


class NotAttention(Attention):
    """A gate over three maps: positions do not meet."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, out = (getattr(self, name) for name in self.names)
        return out(q(x).sigmoid() * k(x).tanh() + v(x))


class NoOut(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (getattr(self, name) for name in self.names[:3])
        return attend(q(x), k(x), v(x), H)


def without_out() -> nn.Module:
    part = NoOut(LLAMA)
    del part.o_proj
    return part


def tied() -> nn.Module:
    part = Attention(LLAMA)
    part.k_proj.weight = part.q_proj.weight
    return part


class ThreefoldGate(nn.Module):
    """Three maps in one layer with unusual names, which are not attention."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.back = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.mixer(x).chunk(3, -1)
        return self.back(a.sigmoid() * b.cumsum(1) * c)


REFUSED: dict[str, Any] = {
    "a gate with a packed layer": ThreefoldGate,
    "q alone": Lone,
    "no output": without_out,
    "not attention": lambda: NotAttention(LLAMA),
    "q and k swapped": lambda: Attention(LLAMA, swap=True),
    "packed in another order": lambda: Packed("qkv proj", "VKQ"),
    "cross attention": lambda: Cross(LLAMA),
    "tied q and k": tied,
    "two spellings": lambda: _two(),
}


def _two() -> nn.Module:
    part = Attention(LLAMA)
    part.wq, part.wk, part.wv = (nn.Linear(D, D) for _ in range(3))
    return part


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_another_reading_keeps_the_names_of_parameters(name: str):
    module = made(lambda: GPT(lambda: Block(REFUSED[name](), plain_ff())))
    model = cs.load(module)
    check_cover(model.blocks, module)
    assert set(model.blocks) == {n for n, _ in module.named_parameters()}
    assert not model.heads
    assert any("roles=" in note for note in model.notes)
    with pytest.raises(cs.UsageError, match=r"cs\.load\(module, roles="):
        model.space("L0.W_Q")


NO_HEADS: dict[str, Any] = {
    "no number of heads": lambda: Attention(LLAMA, heads=""),
    "head is the fastest index": lambda: Attention(LLAMA, mixed=True),
    "cannot be run alone": lambda: WithTable(LLAMA),
}


@pytest.mark.parametrize("name", NO_HEADS)
def test_heads_need_a_layout_that_is_certain(name: str):
    model = cs.load(made(lambda: GPT(lambda: Block(NO_HEADS[name](), plain_ff()))))
    assert {f"L1.{role}" for role in ROLES} <= set(model.blocks)
    assert not model.heads
    assert "n_heads" not in model.facts


def test_one_reading_for_tied_embeddings_and_shared_layers():
    module = made(FOUND["q_proj"])
    module.lm_head.weight = module.tok.weight
    model = cs.load(module)
    check_cover(model.blocks, module)
    assert "E" in model.blocks
    assert "U" not in model.blocks
    module.blocks[1] = module.blocks[0]
    shared = cs.load(module)
    check_cover(shared.blocks, module)
    assert not any(name.startswith("L0.W_Q") for name in shared.blocks)


def test_looking_for_roles_leaves_the_module_alone():
    module = made(FOUND["q_proj"])
    calls: list[int] = []
    module.blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
    before = {n: p.clone() for n, p in module.state_dict().items()}
    random = torch.get_rng_state()
    cs.load(module)
    assert not calls
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[n], p) for n, p in module.state_dict().items())


class Ordered(nn.Module):
    """Linear layers (name, in, out) in the order in which they are used, the first perhaps with a gate."""

    def __init__(self, *layers: tuple[str, int, int], gate: str = ""):
        super().__init__()
        self.order, self.gate_name = [name for name, _, _ in layers], gate
        for name, before, after in (*layers, *([(gate, D, F)] if gate else [])):
            self.add_module(name, nn.Linear(before, after))

    def forward(self, x: Tensor) -> Tensor:
        parts = dict(self.named_children())
        h = parts[self.order[0]](x)
        h = h * parts[self.gate_name](x).sigmoid() if self.gate_name else h
        for name in self.order[1:]:
            h = parts[name](h.tanh())
        return h


class OneClassPacked(nn.Module):
    """Attention and feed-forward network in one module, in which `c_proj` is the output of the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.norm1, self.norm2 = H, nn.LayerNorm(D), nn.LayerNorm(D)
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.c_fc, self.mlp_out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.norm1(x)).chunk(3, -1)
        x = x + self.c_proj(attend(q, k, v, H))
        return x + self.mlp_out(self.c_fc(self.norm2(x)).tanh())


class InLayer(nn.Module):
    """Feed-forward layers beside the attention, used in the order of `names`."""

    def __init__(self, attn: nn.Module, names: tuple[str, str], widths: tuple[int, int]):
        super().__init__()
        self.attn, self.names, self.norm1, self.norm2 = attn, names, nn.LayerNorm(D), nn.LayerNorm(D)
        for name, before, after in zip(names, (D, widths[0]), widths, strict=True):
            self.add_module(name, nn.Linear(before, after))

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        x = x + (self.attn(n, n, n)[0] if isinstance(self.attn, nn.MultiheadAttention) else self.attn(n))
        first, second = (getattr(self, name) for name in self.names)
        return x + second(first(self.norm2(x)).tanh())


def torch_attention() -> nn.Module:
    return nn.MultiheadAttention(D, H, batch_first=True)


NO_FEED_FORWARD: dict[str, Any] = {
    "names the wrong way round": lambda a: Block(a, Ordered(("fc2", D, F), ("fc1", F, D))),
    "the same, square": lambda a: Block(a, Ordered(("linear2", D, D), ("linear1", D, D))),
    "a bottleneck": lambda a: Block(a, Ordered(("down", D, 3), ("up", 3, D))),
    "three": lambda a: Block(
        a, nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, F), nn.GELU(), nn.Linear(F, D))
    ),
    "three with names": lambda a: Block(a, Ordered(("fc1", D, D), ("fc2", D, D), ("fc3", D, D))),
    "one before": lambda a: Block(a, Ordered(("before", D, D), ("fc1", D, F), ("fc2", F, D))),
    "a gate of another name": lambda a: Block(a, Ordered(("up", D, F), ("down", F, D), gate="factor")),
    "in the layer, the wrong way round": lambda a: InLayer(a, ("fc2", "fc1"), (F, D)),
    "in the layer, square": lambda a: InLayer(a, ("fc2", "fc1"), (D, D)),
}


@pytest.mark.parametrize("attention", [lambda: Attention(LLAMA), torch_attention])
@pytest.mark.parametrize("name", NO_FEED_FORWARD)
def test_feed_forward_layers_need_the_order_that_their_names_say(name: str, attention: Any):
    def make() -> nn.Module:
        layer = NO_FEED_FORWARD[name](attention())
        if isinstance(layer, Block) and isinstance(layer.attn, nn.MultiheadAttention):
            return InLayerOf(layer)
        return layer

    module = made(lambda: GPT(make))
    model = cs.load(module)
    check_cover(model.blocks, module)
    assert any(key.endswith("W_Q") for key in model.blocks)
    assert not [key for key in model.blocks if key.rpartition(".")[2] in ("W_1", "W_2", "W_u", "W_g")]


class InLayerOf(nn.Module):
    """A block whose attention is torch's."""

    def __init__(self, block: Block):
        super().__init__()
        self.attn, self.norm1, self.norm2, self.ff = block.attn, block.norm1, block.norm2, block.ff

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        x = x + self.attn(n, n, n)[0]
        return x + self.ff(self.norm2(x))


@pytest.mark.parametrize("attention", [lambda: Attention(LLAMA), torch_attention])
def test_feed_forward_layers_beside_the_attention_have_roles(attention: Any):
    model = cs.load(made(lambda: GPT(lambda: InLayer(attention(), ("fc1", "fc2"), (F, D)))))
    assert model.blocks["L1.W_1"].parameter == "blocks.1.fc1.weight"
    assert model.blocks["L1.W_2"].parameter == "blocks.1.fc2.weight"


def test_the_output_of_an_attention_is_no_feed_forward_layer():
    module = made(lambda: GPT(OneClassPacked))
    model = cs.load(module)
    check_cover(model.blocks, module)
    assert model.blocks["L0.W_O"].parameter == "blocks.0.c_proj.weight"
    assert "L0.W_2" not in model.blocks


@pytest.mark.parametrize(
    ("name", "is_position"),
    [("pos_emb", True), ("embed_positions", True), ("wpe", True), ("exposure", False), ("compose", False)],
)
def test_a_table_of_positions_is_known_by_a_word_of_its_name(name: str, is_position: bool):
    module = made(FOUND["q_proj"])
    module.add_module(name, module.pos)
    del module.pos
    module.forward = lambda x: x  # only looked at
    assert ("P" in cs.load(module).blocks) == is_position
