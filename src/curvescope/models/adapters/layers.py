"""Detection of layers in any module by its structure: attention, and the modules next to it.

A layer is the module around an attention: PyTorch's own layers, or a block of the user with an
`nn.MultiheadAttention`, a packed attention (`models.running.module_replacements`) or an attention made of
linear layers (`own_attention`). The last kind must be in an `nn.ModuleList` or `nn.Sequential` unless there
is only one. Norms and feed-forward networks are recognized by the usual names of libraries; other modules
keep their names. Layers are numbered in the order in which the module registers them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from curvescope.core.blocks import Block
from curvescope.core.seeds import generator
from curvescope.models.adapters.build import WITH_HEADS, HeadCounts, cut_block
from curvescope.models.adapters.own_attention import (
    OwnAttention,
    own_attention,
    takes_second_sequence,
    without_hooks,
)
from curvescope.models.adapters.table import (
    ParameterSlice,
    affine,
    interleaved,
    interleaved_vector,
    linear,
    matrix,
    norm,
    packed,
    packed_vector,
    patches,
    vector,
)
from curvescope.models.running.module_replacements import layout_of

LOG = logging.getLogger("curvescope")
CROSS = ("multihead_attn", "cross_attn", "cross_attention", "encoder_attn", "src_attn", "crossattention")
NORMS = {
    "ln1": ("norm1", "ln_1", "ln1", "norm_1", "layer_norm1", "attn_norm", "attention_norm", "norm_attn"),
    "ln2": ("norm2", "ln_2", "ln2", "norm_2", "layer_norm2", "ffn_norm", "mlp_norm", "norm_ff", "norm_mlp"),
    "q_norm": ("attn.q_norm",),
    "k_norm": ("attn.k_norm",),
}
_HOLDERS_OF_FF = ("", "mlp.", "ff.", "ffn.", "feed_forward.", "feedforward.")
_PAIRS = (
    *(("linear1", "linear2"), ("fc1", "fc2"), ("lin1", "lin2"), ("ff1", "ff2"), ("linear_1", "linear_2")),
    *(("c_fc", "c_proj"), ("fc_in", "fc_out"), ("up", "down"), ("up_proj", "down_proj")),
)
FEED_FORWARD = (
    *((at + first, at + second) for at in _HOLDERS_OF_FF for first, second in _PAIRS),
    *((f"{at}0", f"{at}{last}") for at in _HOLDERS_OF_FF[1:] for last in (2, 3)),
    *((f"{at}net.0", f"{at}net.{last}") for at in _HOLDERS_OF_FF[1:] for last in (2, 3)),
)
GATES = ("gate", "gate_proj")
SCALES = {"ls1": ("ls1.gamma", "ls_1.gamma"), "ls2": ("ls2.gamma", "ls_2.gamma")}
HOLDERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)  # containers of layers


@dataclass(frozen=True)
class LayerPart:
    """A role and its parameter slice, by the module's own names.

    `front` distinguishes several attentions of a layer. Blocks of single heads exist only if `certain`.
    """

    role: str
    cut: ParameterSlice
    heads: HeadCounts | None = None
    front: str = ""
    certain: bool = True


@dataclass(frozen=True)
class DetectedLayer:
    """A layer found in a module: its path, and its parts."""

    path: str
    parts: tuple[LayerPart, ...]
    by_names: bool = False  # its attention consists of linear layers that are recognized by name

    def blocks(self, number: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[Block, bool]]:
        """Iterate over (block, is_head): blocks `L{number}.ROLE`, and heads `L{number}.h{j}.ROLE`."""
        for part in self.parts:
            name, shape = part.cut.parameter, shapes.get(part.cut.parameter)
            if shape is None:
                continue
            role, heads = part.front + part.role, part.heads
            yield cut_block(f"L{number}.{role}", part.role, part.cut, name, shape, heads), False
            if heads is not None and part.certain and part.role in WITH_HEADS:
                for j in range(heads.of(part.role)):
                    key = f"L{number}.h{j}.{role}"
                    yield cut_block(key, part.role, part.cut, name, shape, heads, head=j), True


def find_layers(module: nn.Module) -> list[DetectedLayer]:
    """Return all layers of a module, in its order."""
    modules = dict(module.named_modules())
    attention_by_path: dict[str, OwnAttention | None] = {
        path: None
        for path, part in modules.items()
        if isinstance(part, nn.MultiheadAttention) or layout_of(part) is not None
    }
    attention_by_path |= _linear_attentions(module, modules, attention_by_path)
    attentions: dict[str, list[str]] = {}  # by layer
    for path in (path for path in modules if path in attention_by_path):
        parent = path.rpartition(".")[0]
        alone = not path or isinstance(modules[parent], HOLDERS)
        attentions.setdefault(path if alone else parent, []).append(path)
    return [
        DetectedLayer(
            at,
            tuple(_parts(at, modules, paths, attention_by_path)),
            any(attention_by_path[path] for path in paths),
        )
        for at, paths in attentions.items()
    ]


def _linear_attentions(
    module: nn.Module, modules: Mapping[str, nn.Module], known: Collection[str]
) -> dict[str, OwnAttention]:
    """Return the attentions made of linear layers, by path, that are unambiguous and in a list of layers."""
    named_parameters = module.named_parameters(remove_duplicate=False)
    owners: dict[int, set[str]] = {}
    for name, p in named_parameters:
        owners.setdefault(id(p), set()).add(name)
    candidates: dict[str, OwnAttention] = {}
    for path, part in modules.items():
        name = path.rpartition(".")[2]
        inside = any(path.startswith(f"{other}.") or not other for other in known)
        tied = any(len(owners[id(p)]) > 1 for p in part.parameters())
        if path in known or inside or tied or not list(part.children()):
            continue
        if name not in CROSS and not name.startswith("self") and takes_second_sequence(part):
            continue
        attention = own_attention(part)
        if attention is not None:
            candidates[path] = attention
    if len(candidates) == 1 and not known:
        return candidates
    return {path: attention for path, attention in candidates.items() if _is_listed(path, modules)}


def _is_listed(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return True if the module is inside an element of an `nn.ModuleList` or `nn.Sequential`."""
    names = path.split(".") if path else []
    holders = [modules[".".join(names[:i])] for i in range(len(names))]
    return any(isinstance(holder, nn.ModuleList | nn.Sequential) for holder in holders)


def _parts(
    at: str,
    modules: Mapping[str, nn.Module],
    attentions: list[str],
    own: Mapping[str, OwnAttention | None],
) -> Iterator[LayerPart]:
    prefix, first, used = f"{at}." if at else "", True, set[str]()
    for path in attentions:
        name, linear = path.rpartition(".")[2], own[path]
        front = "cross_" if name in CROSS else "" if first else f"{name}_"
        first = first and front == "cross_"
        cuts = _attention(path, modules[path]) if linear is None else linear.cuts(path)
        for role, cut, heads in cuts:
            used.add(cut.parameter.rpartition(".")[0])
            yield LayerPart(role, cut, heads, front, linear is None or linear.certain)
    if at in attentions and own[at] is None:
        return  # an attention on its own
    for role, cut in _other_parts(prefix, modules, used):
        yield LayerPart(role, cut)


def _attention(path: str, part: Any) -> Iterator[tuple[str, ParameterSlice, HeadCounts]]:
    """Iterate over the roles of an attention whose heads have one size."""
    at = f"{path}." if path else ""
    if isinstance(part, nn.MultiheadAttention):
        heads, out = HeadCounts(part.num_heads, part.num_heads, part.head_dim), "out_proj"
        whole = part.in_proj_weight is not None
        for i, x in enumerate("QKV"):
            projection = linear(f"{at}{x.lower()}_proj_weight")
            yield f"W_{x}", packed(f"{at}in_proj_weight", i) if whole else projection, heads
            yield f"b_{x}", packed_vector(f"{at}in_proj_bias", i), heads
    else:
        heads, out = (
            HeadCounts(part.num_heads, part.num_heads, part.proj.in_features // part.num_heads),
            "proj",
        )
        stacked = layout_of(part) == "stacked"
        for i, x in enumerate("QKV"):
            weight, bias = f"{at}qkv.weight", f"{at}qkv.bias"
            yield f"W_{x}", packed(weight, i) if stacked else interleaved(weight, i), heads
            yield f"b_{x}", packed_vector(bias, i) if stacked else interleaved_vector(bias, i), heads
    for role, cut in affine("O", f"{at}{out}").items():
        yield role, cut, heads


def _feed_forward(
    prefix: str, modules: Mapping[str, nn.Module], attention: Collection[str]
) -> Iterator[tuple[str, ParameterSlice]]:
    """Iterate over W_1 and W_2, or W_g, W_u and W_2 if gated, if exactly one pair of layers has such names.

    The layers must be used in this order. The only other linear layers may be those of the `attention`.
    """
    pairs = []
    for first, second in FEED_FORWARD:
        a, b = (modules.get(prefix + name) for name in (first, second))
        if not {prefix + first, prefix + second} & set(attention) and (
            isinstance(a, nn.Linear) and isinstance(b, nn.Linear) and a.out_features == b.in_features
        ):
            pairs.append((prefix + first, prefix + second))
    if len(pairs) != 1:
        return
    (first, second) = pairs[0]
    front = first[: len(first) - len(first.rpartition(".")[2])]
    gates = [front + name for name in GATES if isinstance(modules.get(front + name), nn.Linear)]
    up = first.rpartition(".")[2].startswith("up")
    if len(gates) > 1 or (gates and not up):
        return
    holder = modules[front.removesuffix(".")]
    neighbors = holder.named_children() if front == prefix else holder.named_modules()
    others = {front + name for name, part in neighbors if isinstance(part, nn.Linear)}
    if others - {first, second, *gates, *attention} or not _in_order(holder, front, first, second):
        return
    for gate in gates:
        yield from affine("g", gate).items()
    yield from affine("u" if gates else "1", first).items()
    yield from affine("2", second).items()


def _in_order(holder: nn.Module, front: str, first: str, second: str) -> bool:
    """Return False if a run of the holder on random numbers uses `second` before `first`.

    Names decide if the holder is a class of torch or cannot be run alone.
    """
    if type(holder).__module__.startswith("torch.nn.modules.transformer"):
        return True
    calls: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: calls.append(name)

    try:
        copied: Any = without_hooks(holder)
        layers: list[Any] = [copied.get_submodule(name.removeprefix(front)) for name in (first, second)]
        for name, layer in zip((first, second), layers, strict=True):
            layer.register_forward_pre_hook(note(name))
        for layer in layers:  # the first layer has the width of the inputs
            if not calls:
                _run(copied, torch.randn((1, 1, layer.in_features), generator=generator(0)).to(layer.weight))
    except Exception as error:  # a module may refuse to be copied
        LOG.debug("%s cannot be copied: %s", front or "the module", error)
    return not calls or calls[0] == first


@torch.no_grad()
def _run(module: Any, x: torch.Tensor) -> None:
    """Run a module, and ignore its errors: the user's code may raise anything."""
    try:
        module(x)
    except Exception as error:
        LOG.debug("%s cannot be run alone: %s", type(module).__name__, error)


def _other_parts(
    prefix: str, modules: Mapping[str, nn.Module], attention: Collection[str]
) -> Iterator[tuple[str, ParameterSlice]]:
    """Iterate over norms, feed-forward matrices and scales of a layer, by their names."""
    layer = modules[prefix.removesuffix(".")]
    if isinstance(layer, nn.TransformerDecoderLayer):
        names = {"ln1": ("norm1",), "ln_cross": ("norm2",), "ln2": ("norm3",)}
    else:
        names = NORMS
    for role, known in names.items():
        path = next((prefix + name for name in known if prefix + name in modules), None)
        if path is not None:
            yield from norm(role, path).items()
    yield from _feed_forward(prefix, modules, attention)
    for role, known in SCALES.items():
        for name in known:
            yield role, vector(prefix + name)


TIMM = {
    "E": patches("patch_embed.proj.weight"),
    "b_E": vector("patch_embed.proj.bias"),
    "E_class": ParameterSlice("cls_token", "1 1 o"),
    "P": ParameterSlice("pos_embed", "1 i o"),
    **norm("ln_e", "norm_pre"),
    **norm("ln_f", "norm"),
    "U": linear("head.weight"),
    "b_U": vector("head.bias"),
}
"""A Vision Transformer of timm."""
OPEN_CLIP = {
    "E": patches("conv1.weight"),
    "E_class": vector("class_embedding"),
    "P": matrix("positional_embedding"),
    **norm("ln_e", "ln_pre"),
    **norm("ln_f", "ln_post"),
    "U": matrix("proj"),
}
"""The image half of a model of open_clip."""


def find_stem(module: nn.Module) -> Iterator[tuple[str, ParameterSlice]]:
    """Iterate over the roles outside of the layers; entries without a parameter are ignored later."""
    names = {name for name, _ in module.named_parameters()}
    kinds = nn.TransformerEncoder, nn.TransformerDecoder
    stacks = [(path, m) for path, m in module.named_modules() if isinstance(m, kinds)]
    decodes = any(isinstance(m, nn.TransformerDecoder) for _, m in stacks)
    for path, stack in stacks:
        role = "ln_enc" if decodes and isinstance(stack, nn.TransformerEncoder) else "ln_f"
        yield from norm(role, f"{path}.norm".lstrip(".")).items()
    if "patch_embed.proj.weight" in names:
        yield from TIMM.items()
    for prefix in ("", "visual."):
        if {f"{prefix}conv1.weight", f"{prefix}class_embedding"} <= names:
            for role, cut in OPEN_CLIP.items():
                yield role, ParameterSlice(prefix + cut.parameter, cut.axes)


FINAL_NORMS = (
    "ln_f",
    "norm",
    "ln",
    "norm_f",
    "final_norm",
    "ln_final",
    "final_layer_norm",
    "ln_post",
    "out_norm",
)


def own_stem(module: nn.Module, layers: Sequence[DetectedLayer]) -> Iterator[tuple[str, ParameterSlice]]:
    """Iterate over E, P, U and ln_f of a model whose layers were recognized by the names of linear layers.

    E is the only embedding outside the layers that is not one of positions. U is the only linear layer there
    with one output per row of E. A role with two candidates is not assigned.
    """
    if not all(layer.by_names and layer.path for layer in layers):
        return
    outside = {
        path: part
        for path, part in module.named_modules()
        if not any(f"{path}.".startswith(f"{layer.path}.") for layer in layers)
    }
    tables = {path: part for path, part in outside.items() if type(part) is nn.Embedding}
    positions = {path for path in tables if _is_position(path)}
    tokens = [path for path in tables if path not in positions]
    if len(positions) == 1:
        yield "P", matrix(f"{next(iter(positions))}.weight")
    if len(tokens) == 1:
        yield "E", matrix(f"{tokens[0]}.weight")
        shape = tables[tokens[0]].weight.shape
        heads = [
            path for path, part in outside.items() if type(part) is nn.Linear and part.weight.shape == shape
        ]
        linears = [part for part in outside.values() if isinstance(part, nn.Linear)]
        if len(heads) == 1 and len(linears) == 1:
            yield "U", linear(f"{heads[0]}.weight")
            yield "b_U", vector(f"{heads[0]}.bias")
    norms = [path for path, part in outside.items() if path and "Norm" in type(part).__name__]
    if len(norms) == 1 and norms[0].rpartition(".")[2].lower() in FINAL_NORMS:
        yield from norm("ln_f", norms[0]).items()


def _is_position(path: str) -> bool:
    words = re.split(r"[^a-z]+", path.rpartition(".")[2].lower())
    return any(re.fullmatch(r"(abs|tok)?pos(i.*|e.*|s)?|wpe|pe", word) for word in words)
