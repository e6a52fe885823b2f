"""Roles of the parameters of a user's module: W_Q, W_O, … of each layer.

    roles = {
        "E": "tok.weight",
        "L{layer}.W_QKV": "blocks.{layer}.attn.qkv.weight",   # Q, K and V packed, in the order of the letters
        "L{layer}.W_O": "blocks.{layer}.attn.out.weight",
        "n_heads": 4,
    }

A role is the name of a block; any name is allowed. `{layer}` stands for the same number in both; layers are
numbered from 0 in the order of these numbers. If `n_heads` is given, the roles W_Q, b_Q, W_K, b_K, W_V, b_V
and W_O are also split into heads, `L0.h3.W_Q`. Other parameters keep their blocks. Further settings:
`n_heads`, `n_kv_heads` (as many unless given) and `packed`, "stacked" (all heads of Q, then of K, then of V)
or "per head" (head 0's Q, K, V, then head 1's, …).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from curvescope.core.blocks import Block
from curvescope.core.errors import UsageError, near_misses
from curvescope.core.number_format import plural
from curvescope.models.adapters.build import WITH_HEADS, HeadCounts, cut_block, rest
from curvescope.models.adapters.table import ParameterSlice
from curvescope.models.model import Model

SETTINGS = ("n_heads", "n_kv_heads", "packed")
LAYER = "{layer}"
PACKED = re.compile(r"(?P<kind>[Wb])_(?P<letters>[QKV]{2,3}|gu|ug)")


@dataclass(frozen=True)
class Layout:
    """Layout of heads in packed matrices."""

    query: int | None
    key: int | None
    per_head: bool

    def heads(self, role: str, cut: ParameterSlice, shape: tuple[int, ...]) -> HeadCounts | None:
        """Return the heads of a role, with the size from the parameter's shape; None if unknown."""
        if role not in WITH_HEADS or (self.query is None and not cut.stacked):
            return None
        query, key = self.query or 1, self.key or 1
        counts = HeadCounts(query, key, 1)
        stored = sum(counts.of(x) for x in cut.order) if cut.stacked else counts.of(role) * cut.parts
        letter = "k" if "k" in cut.axes else "i" if role == "W_O" else "o"
        size = next((n for group, n in zip(cut.axes.split(), shape, strict=False) if letter in group), 0)
        if "k" in cut.axes.split():
            return HeadCounts(query, key, size)
        if size % stored:
            side = "inputs" if letter == "i" else "outputs"
            raise UsageError(
                f"expected {cut.parameter!r} to split into equal parts for {self._words(stored)}, but it "
                f"has {size} {side}"
            )
        return HeadCounts(query, key, size // stored)

    def _words(self, stored: int) -> str:
        """Describe how many parts a matrix has, and where that number comes from."""
        if self.query is None:
            return f"{stored} of Q, K and V"
        given = f"n_heads={self.query}" + (f", n_kv_heads={self.key}" if self.key != self.query else "")
        return (
            f"{plural(stored, 'head')} ({given}{', packed' if stored not in (self.query, self.key) else ''})"
        )


def with_roles(model: Model, roles: Mapping[str, Any]) -> Model:
    """Return the model with these roles; the docstring of this module describes them."""
    if not isinstance(roles, Mapping):
        raise UsageError(f"expected roles as a dictionary, got a {type(roles).__name__}")
    layout = _layout(roles)
    blocks: dict[str, Block] = {}
    head_blocks: dict[str, Block] = {}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for prefix, packed, parameter, axes in _assigned_parameters(roles, model):
        for role, cut in _slices(packed, parameter, axes, layout):
            name = prefix + role
            if name in blocks:
                raise UsageError(
                    f"two parameters have the role {name!r}: {blocks[name].parameter} and {parameter}"
                )
            heads = layout.heads(role, cut, shapes[parameter])
            blocks[name] = cut_block(name, role, cut, parameter, shapes[parameter], heads)
            for j in range(heads.of(role) if heads and layout.query and prefix else 0):
                name = f"{prefix}h{j}.{role}"
                head_blocks[name] = cut_block(name, role, cut, parameter, shapes[parameter], heads, head=j)
    _check_sizes(head_blocks)
    return _merge_blocks(model, blocks, head_blocks, layout)


def _check_sizes(head_blocks: Mapping[str, Block]) -> None:
    """Raise if queries and keys, or values and the inputs of W_O, have different head sizes."""
    pairs = (("W_Q", 1, "W_K", 1), ("W_V", 1, "W_O", 0))
    for prefix in {name.partition("h0.")[0] for name in head_blocks}:
        for role, axis, other_role, other_axis in pairs:
            first, second = (head_blocks.get(f"{prefix}h0.{name}") for name in (role, other_role))
            if first and second and first.shape[axis] != second.shape[other_axis]:
                raise UsageError(
                    f"expected heads of one size in {prefix}{role} and {prefix}{other_role}, "
                    f"got {first.shape[axis]} and {second.shape[other_axis]}",
                    hint="check that the roles, n_heads and n_kv_heads are those of the module",
                )


def _layout(roles: Mapping[str, Any]) -> Layout:
    counts = {key: roles.get(key) for key in ("n_heads", "n_kv_heads")}
    for key, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise UsageError(f"expected {key} of at least 1, got {count!r}")
    packed = roles.get("packed", "stacked")
    if packed not in ("stacked", "per head"):
        raise UsageError(f"expected packed to be 'stacked' or 'per head', got {packed!r}")
    query, key = counts["n_heads"], counts["n_kv_heads"] or counts["n_heads"]
    if query and key and query % key:
        raise UsageError(f"expected n_heads to be a multiple of n_kv_heads, got {query} and {key}")
    if packed == "per head" and (query is None or query != key):
        raise UsageError("packed='per head' needs n_heads, and as many heads of keys and values")
    return Layout(query, key, packed == "per head")


@dataclass(frozen=True)
class RoleAssignment:
    """A parameter assigned to a role: the role as written, the number of the layer, and the stored axes."""

    key: str
    number: int | None
    parameter: str
    axes: str


def _assigned_parameters(roles: Mapping[str, Any], model: Model) -> Iterator[tuple[str, str, str, str]]:
    """Iterate over (`L0.` or nothing, role, parameter, axes) of the parameters named; layers count from 0."""
    assignments = [
        c
        for key, given in roles.items()
        if key not in SETTINGS
        for c in _matching_parameters(key, given, model)
    ]
    layer_index = {
        n: i for i, n in enumerate(sorted({c.number for c in assignments if c.number is not None}))
    }
    first_keys: dict[str, str] = {}
    for assignment in assignments:
        first = first_keys.setdefault(assignment.parameter, assignment.key)
        if first != assignment.key:
            raise UsageError(
                f"expected one role for every parameter, but {assignment.parameter!r} has {first!r} and "
                f"{assignment.key!r}",
                hint="packed matrices are named by their letters, such as W_QKV",
            )
        role = (
            assignment.key
            if assignment.number is None
            else assignment.key.replace(LAYER, str(layer_index[assignment.number]))
        )
        prefix, dot, block_role = role.partition(".") if re.match(r"L\d+\.", role) else ("", "", role)
        yield prefix + dot, block_role, assignment.parameter, assignment.axes


def _matching_parameters(key: str, given: Any, model: Model) -> list[RoleAssignment]:
    """Return the parameters that a pattern names."""
    pattern, axes = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(pattern, str) or not isinstance(axes, str | None):
        raise UsageError(
            f"expected the name of a parameter for the role {key!r}, got {given!r}",
            hint=near_misses(key, list(SETTINGS)),
        )
    if (LAYER in key) != (LAYER in pattern):
        raise UsageError(f"expected {LAYER} in both or in neither of {key!r} and {pattern!r}")
    if axes is not None and not re.fullmatch(r"(?!.*([ihko]).*\1)[ihko1]+( [ihko1]+)*", axes):
        raise UsageError(
            f"expected axes, each once, of the letters i, o, h, k and 1 for the role {key!r}, got {axes!r}"
        )
    names = list(dict(model.named_parameters()))
    rule = re.compile(re.escape(pattern).replace(re.escape(LAYER), r"(\d+)", 1))
    matches = [match for match in map(rule.fullmatch, names) if match]
    if not matches:
        known = dict.fromkeys(re.sub(r"\d+", LAYER, n, count=1) if LAYER in pattern else n for n in names)
        raise UsageError(
            f"no parameter is called {pattern!r}, for the role {key!r}",
            hint=near_misses(pattern, list(known)),
        )
    return [
        RoleAssignment(
            key, int(match[1]) if LAYER in key else None, match[0], axes or _axes(match[0], model.module)
        )
        for match in matches
    ]


def _axes(parameter: str, module: nn.Module) -> str:
    """Return the axes of a stored parameter: outputs × inputs for linear layers, else inputs × outputs."""
    p, owner = module.get_parameter(parameter), module.get_submodule(parameter.rpartition(".")[0])
    kernel = isinstance(owner, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if p.dim() > 2 and not kernel:
        raise UsageError(
            f"expected the axes of {parameter!r}, which has {p.dim()} dimensions",
            hint=f"such as ({parameter!r}, 'h i k'): heads, inputs, head size",
        )
    if p.dim() < 2:
        return "o"
    return "o i" if kernel or isinstance(owner, nn.Linear) else "i o"


def _slices(role: str, parameter: str, axes: str, layout: Layout) -> Iterator[tuple[str, ParameterSlice]]:
    """Iterate over the roles of a parameter: its own, or one per letter of a packed one."""
    match = PACKED.fullmatch(role)
    if match is None or len(set(match["letters"])) < len(match["letters"]):
        yield role, ParameterSlice(parameter, axes)
        return
    letters = match["letters"]
    for part, letter in enumerate(letters):
        part_role = f"{match['kind']}_{letter}"
        if letter in "gu":
            yield part_role, ParameterSlice(parameter, axes.replace("o", "po"), part, len(letters))
        elif layout.per_head:
            yield part_role, ParameterSlice(parameter, axes.replace("o", "hpk"), part, len(letters))
        else:
            yield part_role, ParameterSlice(parameter, axes, part, stacked=True, order=letters)


def _merge_blocks(
    model: Model, blocks: dict[str, Block], head_blocks: dict[str, Block], layout: Layout
) -> Model:
    """Return the model with these blocks, and its own blocks for all other parameters."""
    assigned = {block.parameter for block in blocks.values()}
    untouched = {n: b for n, b in model.blocks.items() if b.parameter not in assigned and n not in blocks}
    merged = {**blocks, **untouched}
    merged |= rest(model.module, {block.parameter for block in merged.values()})
    remaining_heads = {
        n: b for n, b in model.heads.items() if b.parameter not in assigned and n not in head_blocks
    }
    layers = {name.partition(".")[0] for name in merged if re.match(r"L\d+\.", name)}
    facts = {**model.facts, **({"n_layers": len(layers)} if layers else {})}
    some_W_Q = next((b for n, b in blocks.items() if n.endswith(".W_Q")), None)
    if some_W_Q is not None and layout.query:
        facts |= {"n_heads": layout.query, "n_kv_heads": layout.key, "d_model": some_W_Q.shape[0]}
        facts |= {"d_head": some_W_Q.shape[1] // layout.query}
    order = {name: i for i, name in enumerate(dict(model.named_parameters()))}
    merged = dict(sorted(merged.items(), key=lambda item: order[item[1].parameter]))
    return replace(model, blocks=merged, heads={**remaining_heads, **head_blocks}, facts=facts)
