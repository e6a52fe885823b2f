"""Sources of second derivatives in a network: the calls that belong to each source, by its name.

A source is a norm, an attention or a feed-forward network of one layer: `L0.ln1`, `L0.attention`, `L0.ffn`,
and `ln_f` after the layers. Its calls are found from the blocks: the largest modules that only hold
parameters of that source, or a method if the layer computes the source itself. Layers without roles (Mamba,
RWKV) are split into their submodules, by name: `L0.mixer`. All other operations, such as an activation that
is not a module, are in the rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Layer

REST = "rest"
"""Name of the remaining part: the head, which is linear in the stream and in U."""
LAYER = re.compile(r"(L\d+)\.(.+)")
NORM = re.compile(r"(ln\w*)\.[gb]")
ATTENTION = re.compile(r"(?:(\w+)_)?[Wb]_(?:Q|K|V|O|S|QK|QKV)|[qk]_norm\.[gb]|P_rel")
FEED_FORWARD = re.compile(r"(?:(?:expert\d+|shared)\.)?[Wb]_(?:1|2|g|u|gu)|W_(?:router|shared)")
METHODS: Mapping[type[nn.Module], Mapping[str, str]] = MappingProxyType(
    {
        Layer: {"attention": "attend", "ffn": "feed_forward"},
        nn.TransformerEncoderLayer: {"attention": "_sa_block", "ffn": "_ff_block"},
        nn.TransformerDecoderLayer: {"attention": "_sa_block", "cross": "_mha_block", "ffn": "_ff_block"},
    }
)
"""Layers that compute a source in a method of their own."""


HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.Embedding)  # containers are not called; embeddings are not layers


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """Return the largest group of sibling modules of one class, by parameters.

    The list is empty if no class occurs twice. Embeddings do not count as layers.
    """
    groups: list[list[nn.Module]] = []
    for parent in module.modules():
        kinds: dict[type[nn.Module], list[nn.Module]] = {}
        for child in parent.children():
            if not isinstance(child, HOLDERS):
                kinds.setdefault(type(child), []).append(child)
        groups += [group for group in kinds.values() if len(group) > 1]
    sizes = [sum(p.numel() for layer in group for p in layer.parameters()) for group in groups]
    return groups[sizes.index(max(sizes))] if any(sizes) else []


class MethodCall(NamedTuple):
    """A method `owner.method`: a function of its inputs and of the owner's parameters."""

    owner: nn.Module
    method: str = "forward"


def find_sources(model: Model) -> dict[str, tuple[MethodCall, ...]]:
    """Return the calls of each source, layer by layer; other parts have no entry."""
    source = {block.parameter: _of_block(block.name) for block in model.blocks.values()}
    if not any(source.values()):
        source = _of_children(model.module)
    calls: dict[str, list[MethodCall]] = {name: [] for name in source.values() if name}
    for name, called in _visit(model.module, "", source):
        calls.setdefault(name, []).append(called)
    return {name: tuple(calls[name]) for name in sorted(calls, key=_layer) if calls[name]}


def outside_blocks(model: Model) -> list[str]:
    """Return the blocks whose parameters are in no source (E, P, U); their curvature is in the rest."""
    names = [block.name for block in model.blocks.values()]
    if any(_of_block(name) for name in names):
        return [name for name in names if _of_block(name) is None]
    source = _of_children(model.module)
    return [block.name for block in model.blocks.values() if source.get(block.parameter) is None]


def _layer(source: str) -> float:
    """Return the layer of a source; norms of embeddings come first, norms after the layers last."""
    match = LAYER.fullmatch(source)
    return int(match[1][1:]) if match else -1 if source == "ln_e" else math.inf


def _of_block(name: str) -> str | None:
    """Return the source of a block; None for embeddings and the head."""
    match = LAYER.fullmatch(name)
    front, role = (f"{match[1]}.", match[2]) if match else ("", name)
    if norm := NORM.fullmatch(role):
        return front + norm[1]
    if front and (attention := ATTENTION.fullmatch(role)):
        return front + (attention[1] or "attention")
    return front + "ffn" if front and FEED_FORWARD.fullmatch(role) else None


def _of_children(module: nn.Module) -> dict[str, str | None]:
    """Map each parameter to the submodule of its repeated layer; outside layers, to a norm by name."""
    names = {part: name for name, part in module.named_modules()}
    inside = {
        f"{names[layer]}.{child}": f"L{i}.{child}"
        for i, layer in enumerate(repeated_layers(module))
        for child, _ in layer.named_children()
    }
    source_of: dict[str, str | None] = {}
    for name, p in module.named_parameters():
        owner = name.rpartition(".")[0]
        last = owner.rpartition(".")[2]
        outside = last if inside and p.dim() == 1 and last else None
        source_of[name] = next((s for front, s in inside.items() if name.startswith(f"{front}.")), outside)
    return source_of


def _visit(part: nn.Module, front: str, source: Mapping[str, str | None]) -> Iterator[tuple[str, MethodCall]]:
    """Iterate over (source, call) in a part whose parameters' names begin with `front`."""
    inside = {source.get(front + name) for name, _ in part.named_parameters()}
    methods, named = METHODS.get(type(part), {}), sorted(filter(None, inside))
    for kind, method in methods.items():
        yield from ((name, MethodCall(part, method)) for name in named if name.endswith(f".{kind}"))
    if len(inside) == 1 and named and front and not methods and not isinstance(part, HOLDERS):
        yield named[0], MethodCall(part)
        return
    layer = named[0].partition(".")[0] + "." if named and re.search(r"\d\.$", front) else ""
    for name, child in part.named_children():
        below = {source.get(f"{front}{name}.{n}") for n, _ in child.named_parameters()}
        if not below and "norm" in type(child).__name__.lower():  # one without a gain
            yield layer + name, MethodCall(child)
        elif any(s is None or s.rpartition(".")[2] not in methods for s in below):
            yield from _visit(child, f"{front}{name}.", source)
