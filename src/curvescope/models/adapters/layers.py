"""Layers that are found in any module by their structure: what attends, and what stands beside it.

A layer is the module around an attention: PyTorch's own layers, or a block of one's own with an
`nn.MultiheadAttention` or a packed attention (`models.running.packed`) in it. Its norms and its feed-forward
network are taken by the names that libraries give them; what has another name keeps it. Layers are counted
through the whole module, in the order in which it holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from curvescope.core.blocks import Block
from curvescope.models.adapters.build import WITH_HEADS, Heads, cut_block
from curvescope.models.adapters.table import (
    Cut,
    affine,
    interleaved,
    interleaved_vector,
    linear,
    norm,
    packed,
    packed_vector,
    vector,
)
from curvescope.models.running.packed import layout_of

CROSS = ("multihead_attn", "cross_attn", "cross_attention", "encoder_attn", "src_attn", "crossattention")
NORMS = {
    "ln1": ("norm1", "ln_1", "ln1", "norm_1", "layer_norm1", "attn_norm", "attention_norm", "norm_attn"),
    "ln2": ("norm2", "ln_2", "ln2", "norm_2", "layer_norm2", "ffn_norm", "mlp_norm", "norm_ff", "norm_mlp"),
    "q_norm": ("attn.q_norm",),
    "k_norm": ("attn.k_norm",),
}
FEED_FORWARD = (
    ("linear1", "linear2"),
    ("mlp.fc1", "mlp.fc2"),
    ("mlp.c_fc", "mlp.c_proj"),
    *((f"{name}.0", f"{name}.{last}") for name in ("mlp", "ff", "ffn", "feed_forward") for last in (2, 3)),
    ("fc1", "fc2"),
    ("lin1", "lin2"),
)
SCALES = {"ls1": ("ls1.gamma", "ls_1.gamma"), "ls2": ("ls2.gamma", "ls_2.gamma")}
HOLDERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)  # they hold layers, and are none


@dataclass(frozen=True)
class Part:
    """A role and its cut, by the module's own names; `front` tells several attentions of a layer apart."""

    role: str
    cut: Cut
    heads: Heads | None = None
    front: str = ""


@dataclass(frozen=True)
class Layer:
    """A layer: where it is, and its parts."""

    path: str
    parts: tuple[Part, ...]

    def blocks(self, number: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[Block, bool]]:
        """Blocks `L{number}.ROLE`, and with True those of single heads, `L{number}.h{j}.ROLE`."""
        for part in self.parts:
            name, shape = part.cut.parameter, shapes.get(part.cut.parameter)
            if shape is None:
                continue
            role, heads = part.front + part.role, part.heads
            yield cut_block(f"L{number}.{role}", part.role, part.cut, name, shape, heads), False
            if heads is not None and part.role in WITH_HEADS:
                for j in range(heads.of(part.role)):
                    key = f"L{number}.h{j}.{role}"
                    yield cut_block(key, part.role, part.cut, name, shape, heads, head=j), True


def find_layers(module: nn.Module) -> list[Layer]:
    """All layers of a module, in its order."""
    modules = dict(module.named_modules())
    attentions: dict[str, list[str]] = {}  # by layer
    for path, part in modules.items():
        if isinstance(part, nn.MultiheadAttention) or layout_of(part) is not None:
            parent = path.rpartition(".")[0]
            alone = not path or isinstance(modules[parent], HOLDERS)
            attentions.setdefault(path if alone else parent, []).append(path)
    return [Layer(at, tuple(_parts(at, modules, found))) for at, found in attentions.items()]


def _parts(at: str, modules: Mapping[str, nn.Module], attentions: list[str]) -> Iterator[Part]:
    prefix, first = f"{at}." if at else "", True
    for path in attentions:
        name = path.rpartition(".")[2]
        front = "cross_" if name in CROSS else "" if first else f"{name}_"
        first = first and front == "cross_"
        for role, cut, heads in _attention(path, modules[path]):
            yield Part(role, cut, heads, front)
    if at in attentions:
        return  # an attention on its own
    for role, cut in _beside(prefix, modules):
        yield Part(role, cut)


def _attention(path: str, part: Any) -> Iterator[tuple[str, Cut, Heads]]:
    """Roles of an attention, heads of one size."""
    at = f"{path}." if path else ""
    if isinstance(part, nn.MultiheadAttention):
        heads, out = Heads(part.num_heads, part.num_heads, part.head_dim), "out_proj"
        whole = part.in_proj_weight is not None
        for i, x in enumerate("QKV"):
            own = linear(f"{at}{x.lower()}_proj_weight")
            yield f"W_{x}", packed(f"{at}in_proj_weight", i) if whole else own, heads
            yield f"b_{x}", packed_vector(f"{at}in_proj_bias", i), heads
    else:
        heads, out = Heads(part.num_heads, part.num_heads, part.proj.in_features // part.num_heads), "proj"
        stacked = layout_of(part) == "stacked"
        for i, x in enumerate("QKV"):
            weight, bias = f"{at}qkv.weight", f"{at}qkv.bias"
            yield f"W_{x}", packed(weight, i) if stacked else interleaved(weight, i), heads
            yield f"b_{x}", packed_vector(bias, i) if stacked else interleaved_vector(bias, i), heads
    for role, cut in affine("O", f"{at}{out}").items():
        yield role, cut, heads


def _beside(prefix: str, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Cut]]:
    """Norms, feed-forward matrices and scales of a layer, by their names."""
    layer = modules[prefix.removesuffix(".")]
    if isinstance(layer, nn.TransformerDecoderLayer):
        names = {"ln1": ("norm1",), "ln_cross": ("norm2",), "ln2": ("norm3",)}
    else:
        names = NORMS
    for role, known in names.items():
        found = next((prefix + name for name in known if prefix + name in modules), None)
        if found is not None:
            yield from norm(role, found).items()
    for first, second in FEED_FORWARD:
        pair = [modules.get(prefix + name) for name in (first, second)]
        if all(isinstance(m, nn.Linear) for m in pair):
            yield from affine("1", prefix + first).items()
            yield from affine("2", prefix + second).items()
            break
    for role, known in SCALES.items():
        for name in known:
            yield role, vector(prefix + name)
