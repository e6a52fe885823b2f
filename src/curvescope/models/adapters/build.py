"""From a declared table to blocks: every parameter once, heads beside them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from curvescope.core.blocks import Block, whole
from curvescope.core.errors import ShapeError
from curvescope.models.adapters.table import Cut, Family

ORDER = "1epihko"  # inputs before outputs: W_Q is i × (h k), W_O is (h k) × o
LORA = re.compile(r"(?P<module>.+)\.(?P<kind>lora_\w+)\.(?P<adapter>\w+)(\.weight)?")
WITH_HEADS = ("W_Q", "b_Q", "W_K", "b_K", "W_V", "b_V", "W_O")


@dataclass(frozen=True)
class Heads:
    """Heads of queries, heads of keys and values, and their size."""

    query: int
    key: int
    size: int

    def of(self, role: str) -> int:
        """How many heads a role has: keys and values are counted by their own."""
        return self.key if role[-1] in "KV" else self.query


def build_blocks(
    module: nn.Module, family: Family, num_layers: int, heads: Heads | None
) -> tuple[dict[str, Block], dict[str, Block]]:
    """Blocks by role, and the blocks of single heads; what the table does not name keeps its own name."""
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
    """`L0.W_Q.lora_A` for the matrix that PEFT adds to W_Q, `L0.W_QKV.lora_A` where one serves all three.

    An adapter that is not called `default` adds its name: `L0.W_Q.lora_A.french`. They are stored outputs ×
    inputs, and laid out inputs × outputs, as all roles are.
    """
    roles: dict[str, list[str]] = {}
    for name, block in blocks.items():
        if len(block.shape) > 1:
            roles.setdefault(plain_name(block.parameter).removesuffix(".weight"), []).append(name)
    found = {}
    for name, block in others.items():
        match = LORA.fullmatch(plain_name(block.parameter))
        owners = roles.get(match["module"], []) if match else []
        if match and owners:
            rest_of_them = "".join(owner.rpartition("_")[2] for owner in owners[1:])
            adapter = "" if match["adapter"] == "default" else f".{match['adapter']}"
            name = f"{owners[0]}{rest_of_them}.{match['kind']}{adapter}"
            linear = block.parameter.endswith(".weight") and len(block.shape) == 2
            block = whole(name, block.parameter, block.split, transposed=linear)
        found[name] = block
    return found


def rest(module: nn.Module, taken: set[str]) -> dict[str, Block]:
    """The parameters that are not `taken`, whole, under their own names and in their own layout."""
    left = {key: p for key, p in module.named_parameters() if key not in taken and p.numel()}
    return {key: whole(key, key, p.shape) for key, p in left.items()}


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and LoRA wrap around it."""
    return name.replace("_orig_mod.", "").removeprefix("base_model.model.").replace(".base_layer.", ".")


def body_prefix(family: Family, names: Iterable[str]) -> str:
    """`base.` where the module has a head around its body, else nothing."""
    prefix = f"{family.base}." if family.base else ""
    return prefix if any(name.startswith(prefix) for name in names) else ""


def layers_of(family: Family, num_layers: int, names: Collection[str]) -> list[tuple[str, Mapping[str, Cut]]]:
    """What the names in each layer begin with, and its roles: an encoder's, then those of its decoder."""
    found = [(family.layer.format(i=i), family.roles) for i in range(num_layers)]
    if not family.decoder:
        return found
    found += [(family.decoder.format(i=i), family.decoder_roles) for i in range(num_layers)]
    return [layer for layer in found if any(name.startswith(layer[0]) for name in names)]


def _wanted(
    family: Family, num_layers: int, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str, Cut, str]]:
    """(block, role, cut, parameter) for every entry of the table whose parameter is there, in order."""
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


def _experts(table: Mapping[str, Cut], prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Cut]:
    """`expert3.W_g` and so on: the entries of a table once for every expert that the parameters stack."""
    stacks = [shapes[prefix + cut.parameter] for cut in table.values() if prefix + cut.parameter in shapes]
    count = stacks[0][0] if stacks else 0
    return {f"expert{e}.{role}": replace(cut, expert=e) for e in range(count) for role, cut in table.items()}


def cut_block(
    name: str,
    role: str,
    cut: Cut,
    parameter: str,
    shape: tuple[int, ...],
    heads: Heads | None,
    *,
    head: int | None = None,
) -> Block:
    """The block of a cut, or of one of its heads."""
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
    own = [prod(sizes[x] for x in group) for group in ("i", "hk", "o") if group[0] in letters]
    straight = order == tuple(range(len(order)))
    return Block(name, parameter, split, tuple(own), None if straight else order, tuple(narrow))


def without_front(role: str) -> str:
    """`W_Q` for the `cross_W_Q` of a decoder's attention to its encoder."""
    return role.removeprefix("cross_")


def _axes(cut: Cut, role: str) -> str:
    role = without_front(role)
    if role == "W_O":
        return cut.axes.replace("i", "hk")
    return cut.axes.replace("o", "hk") if role in WITH_HEADS else cut.axes


def _split(axes: str, shape: tuple[int, ...], known: Mapping[str, int], parameter: str) -> tuple[int, ...]:
    """The stored shape with every axis that holds several letters split; trailing axes may be flattened."""
    groups = axes.split()
    flat = (*shape[: len(groups) - 1], prod(shape[len(groups) - 1 :]))
    found: list[int] = []
    for group, size in zip(groups, flat, strict=True):
        free = [x for x in group if x not in known]
        own = prod(known[x] for x in group if x in known)
        if own == 0 or size % own or (not free and size != own):
            raise ShapeError(
                f"expected {parameter!r} to be cut as {axes!r} with sizes {dict(known)}, got shape {shape}",
                hint="the configuration does not fit the weights",
            )
        found += [known.get(x, size // own) for x in group]
    return tuple(found)
