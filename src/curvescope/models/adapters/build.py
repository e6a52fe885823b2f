"""Build blocks from a family's table: every parameter once, and blocks of single heads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from curvescope.core.blocks import Block, parameter_block
from curvescope.core.errors import ShapeError
from curvescope.models.adapters.table import Family, ParameterSlice

ORDER = "1epihko"  # inputs before outputs: W_Q is i × (h k), W_O is (h k) × o
LORA = re.compile(r"(?P<module>.+)\.(?P<kind>lora_\w+)\.(?P<adapter>\w+)(\.weight)?")
WITH_HEADS = ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "W_O")


@dataclass(frozen=True)
class HeadCounts:
    """Heads of queries, heads of keys and values, and their size."""

    query: int
    key: int
    size: int

    def of(self, role: str) -> int:
        """Return the number of heads of a role; keys and values may have fewer than queries."""
        return self.key if role[-1] in "KV" else self.query


def build_blocks(
    module: nn.Module, family: Family, num_layers: int, heads: HeadCounts | None
) -> tuple[dict[str, Block], dict[str, Block]]:
    """Return the blocks by role, and the blocks of single heads. Other parameters keep their own names."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    stored = {plain_name(name): name for name in shapes}
    blocks: dict[str, Block] = {}
    singles: dict[str, Block] = {}
    plain = {known: shapes[name] for known, name in stored.items()}
    for name, role, cut, known in _wanted(family, num_layers, plain):
        parameter = stored[known]
        blocks[name] = cut_block(name, role, cut, parameter, shapes[parameter], heads)
        if without_front(role) in WITH_HEADS and heads is not None:
            layer = name.split(".")[0]
            for j in range(heads.of(role)):
                key = f"{layer}.h{j}.{role}"
                singles[key] = cut_block(key, role, cut, parameter, shapes[parameter], heads, head=j)
    blocks.update(_lora_named(rest(module, {block.parameter for block in blocks.values()}), blocks))
    return blocks, singles


def _lora_named(others: Mapping[str, Block], blocks: Mapping[str, Block]) -> dict[str, Block]:
    """Name PEFT's matrices after their role: `L0.W_Q.lora_A`, or `L0.W_QKV.lora_A` if one serves all three.

    An adapter that is not called `default` adds its name: `L0.W_Q.lora_A.french`. PEFT stores them outputs ×
    inputs; the blocks are inputs × outputs, like all roles.
    """
    roles: dict[str, list[str]] = {}
    for name, block in blocks.items():
        if len(block.shape) > 1:
            roles.setdefault(plain_name(block.parameter).removesuffix(".weight"), []).append(name)
    renamed = {}
    for name, block in others.items():
        match = LORA.fullmatch(plain_name(block.parameter))
        owners = roles.get(match["module"], []) if match else []
        if match and owners:
            rest_of_them = "".join(owner.rpartition("_")[2] for owner in owners[1:])
            adapter = "" if match["adapter"] == "default" else f".{match['adapter']}"
            name = f"{owners[0]}{rest_of_them}.{match['kind']}{adapter}"
            linear = block.parameter.endswith(".weight") and len(block.shape) == 2
            block = parameter_block(name, block.parameter, block.split, transposed=linear)
        renamed[name] = block
    return renamed


def rest(module: nn.Module, taken: set[str]) -> dict[str, Block]:
    """Return blocks for the parameters that are not `taken`, with their own names and layout."""
    remaining = {key: p for key, p in module.named_parameters() if key not in taken and p.numel()}
    return {key: parameter_block(key, key, p.shape) for key, p in remaining.items()}


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of torch.compile and LoRA."""
    return name.replace("_orig_mod.", "").removeprefix("base_model.model.").replace(".base_layer.", ".")


def body_prefix(family: Family, names: Iterable[str]) -> str:
    """Return `base.` if the module has a head around its body, else an empty string."""
    prefix = f"{family.base}." if family.base else ""
    return prefix if any(name.startswith(prefix) for name in names) else ""


def layers_of(
    family: Family, num_layers: int, names: Collection[str]
) -> list[tuple[str, Mapping[str, ParameterSlice]]]:
    """Return the name prefix and the roles of each layer: the encoder's layers, then the decoder's."""
    layers = [(family.layer.format(i=i), family.roles) for i in range(num_layers)]
    if not family.decoder:
        return layers
    layers += [(family.decoder.format(i=i), family.decoder_roles) for i in range(num_layers)]
    return [layer for layer in layers if any(name.startswith(layer[0]) for name in names)]


def _wanted(
    family: Family, num_layers: int, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str, ParameterSlice, str]]:
    """Iterate over (block, role, slice, parameter) for the entries of the table whose parameters exist."""
    body = body_prefix(family, shapes)
    entries = [("", body, family.stem)]
    for i, (layer, roles) in enumerate(layers_of(family, num_layers, shapes)):
        front, prefix = f"L{i}.", body + layer
        entries += [(front, prefix, roles), (front, prefix, _experts(family.experts, prefix, shapes))]
    entries += [("", body, family.end), ("", "", family.head)]
    for front, prefix, table in entries:
        for role, cut in table.items():
            if prefix + cut.parameter in shapes:
                yield front + role, role, cut, prefix + cut.parameter


def _experts(
    table: Mapping[str, ParameterSlice], prefix: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, ParameterSlice]:
    """Return the entries of a table once per expert: `expert3.W_g` and so on."""
    stacks = [shapes[prefix + cut.parameter] for cut in table.values() if prefix + cut.parameter in shapes]
    count = stacks[0][0] if stacks else 0
    return {f"expert{e}.{role}": replace(cut, expert=e) for e in range(count) for role, cut in table.items()}


def cut_block(
    name: str,
    role: str,
    cut: ParameterSlice,
    parameter: str,
    shape: tuple[int, ...],
    heads: HeadCounts | None,
    *,
    head: int | None = None,
) -> Block:
    """Return the block of a parameter slice, or of one of its heads."""
    axes = _axes(cut, role) if heads is not None else cut.axes
    h = heads.of(role) if heads is not None else 0
    start, stored = 0, h
    if cut.stacked and heads is not None:
        counts = [heads.of(x) for x in cut.order]
        start, stored = sum(counts[: cut.part]), sum(counts)
    known = {"h": stored, "k": heads.size if heads else 0, "p": cut.parts, "1": 1}
    split = _split(axes, shape, known, parameter)
    letters = axes.replace(" ", "")
    sizes, narrow = dict(zip(letters, split, strict=True)), []
    if "e" in letters:
        narrow.append((letters.index("e"), cut.expert, 1))
    if "p" in letters and cut.parts > 1:
        narrow.append((letters.index("p"), cut.part, 1))
    if "h" in letters and (head is not None or stored != h):
        sizes["h"] = h if head is None else 1
        narrow.append((letters.index("h"), start + (head or 0), sizes["h"]))
    order = tuple(sorted(range(len(letters)), key=lambda axis: ORDER.index(letters[axis])))
    widths = [prod(sizes[x] for x in group) for group in ("i", "hk", "o") if group[0] in letters]
    straight = order == tuple(range(len(order)))
    return Block(name, parameter, split, tuple(widths), None if straight else order, tuple(narrow))


def without_front(role: str) -> str:
    """Return the role without `cross_`, the prefix of a decoder's attention to its encoder."""
    return role.removeprefix("cross_")


def _axes(cut: ParameterSlice, role: str) -> str:
    role = without_front(role)
    if role == "W_O":
        return cut.axes.replace("i", "hk")
    return cut.axes.replace("o", "hk") if role in WITH_HEADS else cut.axes


def _split(axes: str, shape: tuple[int, ...], known: Mapping[str, int], parameter: str) -> tuple[int, ...]:
    """Return the stored shape with one axis per letter; trailing axes may be flattened."""
    groups = axes.split()
    flat = (*shape[: len(groups) - 1], prod(shape[len(groups) - 1 :]))
    sizes: list[int] = []
    for group, size in zip(groups, flat, strict=True):
        free = [x for x in group if x not in known]
        product = prod(known[x] for x in group if x in known)
        if product == 0 or size % product or (not free and size != product):
            raise ShapeError(
                f"expected {parameter!r} to be cut as {axes!r} with sizes {dict(known)}, got shape {shape}",
                hint="the configuration does not fit the weights",
            )
        sizes += [known.get(x, size // product) for x in group]
    return tuple(sizes)
