"""Attention modules that a user wrote from `nn.Linear` layers: found by names, confirmed by running them.

A module is a candidate if its linear layers are named in one usual spelling (`q_proj`, `wq`, `to_q`, packed
`qkv`, …) and exactly one of them is the output. Without such names, every linear layer with three times as
many outputs as inputs may be a packed projection, and every other one the output. The finder then runs a copy
of the module on random numbers, changes some columns of the projections at one position, and compares the
input of the output layer:

    columns of Q change their own head, at this position only,
    columns of K change their own head, at other positions too,
    one column of V changes the same column of each head that reads it.

A module that contradicts this has no roles. A module that cannot be run alone has roles without heads if Q, K
and V are separate, and none if they are packed, because names do not tell the order of the rows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvescope.core.seeds import generator
from curvescope.models.adapters.build import HeadCounts
from curvescope.models.adapters.table import (
    ParameterSlice,
    affine,
    interleaved,
    interleaved_vector,
    packed,
    packed_vector,
)

FRAMES = ("{}", "{}_proj", "w{}", "w_{}", "to_{}", "{}_lin", "{}_linear", "linear_{}", "fc_{}")
SEPARATE = (
    *(tuple(frame.format(x) for x in "qkv") for frame in FRAMES),
    *(tuple(word + end for word in ("query", "key", "value")) for end in ("", "_proj", "_layer")),
    ("queries", "keys", "values"),
)
PACKED = ("qkv", "c_attn", "qkv_proj", "to_qkv", "in_proj", "wqkv", "w_qkv", "query_key_value", "attn_qkv")
OUT = (
    *(frame.format(x) for frame in FRAMES for x in ("o", "out")),
    *("proj", "c_proj", "dense", "output", "projection", "out_projection", "output_proj"),
)
NUM_HEADS = (
    "n_head",
    "n_heads",
    "num_heads",
    "num_head",
    "heads",
    "nhead",
    "nheads",
    "num_attention_heads",
    "h",
    "nh",
)
NUM_KV_HEADS = ("n_kv_heads", "n_kv_head", "num_kv_heads", "kv_heads", "num_key_value_heads")
SECOND_SEQUENCE_NAMES = (
    "context",
    "memory",
    "mem",
    "enc",
    "encoder",
    "encoder_output",
    "encoder_hidden_states",
    "kv",
    "cond",
)
T, AT = 3, 1  # number of positions of the trial, and the position that is changed


@dataclass(frozen=True)
class OwnAttention:
    """The linear layers of an attention module, by name, and the layout of its heads.

    With `certain=False`, `heads` only tells where Q, K and V are in packed rows.
    """

    projections: tuple[str, ...]  # Q, K, V, or one that holds all three
    out: str
    heads: HeadCounts | None
    interleaved: bool = False
    certain: bool = True

    def cuts(self, path: str) -> Iterator[tuple[str, ParameterSlice, HeadCounts | None]]:
        """Iterate over roles and parameter slices; `path` is the module's name in the model."""
        at = f"{path}." if path else ""
        for i, x in enumerate("QKV"):
            if len(self.projections) == 3:
                weight, bias = affine(x, at + self.projections[i]).values()
            else:
                names = (f"{at}{self.projections[0]}.{kind}" for kind in ("weight", "bias"))
                kinds = (interleaved, interleaved_vector) if self.interleaved else (packed, packed_vector)
                weight, bias = (kind(name, i) for kind, name in zip(kinds, names, strict=True))
            yield f"W_{x}", weight, self.heads
            yield f"b_{x}", bias, self.heads
        for role, cut in affine("O", at + self.out).items():
            yield role, cut, self.heads


def own_attention(part: nn.Module) -> OwnAttention | None:
    """Return the attention that a module computes with its linear layers, or None if that is ambiguous."""
    if isinstance(part, nn.MultiheadAttention) or _is_shared(part):
        return None
    linear = {name.lower(): name for name, child in part.named_children() if _linear(child) is not None}
    separate = [names for names in SEPARATE if set(names) <= set(linear)]
    joined = [(name,) for name in PACKED if name in linear]
    if len(separate) + len(joined) > 1:
        return None
    candidates = separate or joined or [(name,) for name in linear if _is_threefold(part, linear[name])]
    choices = [tuple(linear[name] for name in names) for names in candidates]
    choices = [names for names in choices if all(isinstance(getattr(part, n), nn.Linear) for n in names)]
    outputs = [linear[name] for name in OUT if name in linear]
    if len(outputs) == 1 and (separate or joined):
        return _confirmed(part, choices[0], _linear_path(part, outputs[0])) if choices else None
    pairs = [(names, out) for names in choices for out in linear.values() if out not in names]
    readings = [_confirmed(part, names, _linear_path(part, out), by_name=False) for names, out in pairs]
    confirmed = [reading for reading in readings if reading is not None]
    return confirmed[0] if len(confirmed) == 1 else None


def _is_threefold(part: Any, name: str) -> bool:
    """Return True if the linear layer has three times as many outputs as inputs."""
    layer = part.get_submodule(_linear_path(part, name))
    return layer.out_features == 3 * layer.in_features


def _linear_path(part: Any, name: str) -> str:
    """Return the path of the linear layer that the child `name` is, or begins with."""
    return name if isinstance(getattr(part, name), nn.Linear) else f"{name}.0"


def _linear(child: nn.Module) -> nn.Linear | None:
    """Return a linear layer, or the first entry of an `nn.Sequential` without other parameters."""
    if isinstance(child, nn.Sequential) and len(child):
        return _linear(child[0]) if not any(list(m.parameters()) for m in list(child)[1:]) else None
    return child if type(child) is nn.Linear else None


def _is_shared(part: nn.Module) -> bool:
    """Return True if a parameter of the module has two names in it."""
    return len(list(part.named_parameters(remove_duplicate=False))) > len(list(part.parameters()))


def _confirmed(
    part: nn.Module, names: tuple[str, ...], out: str, *, by_name: bool = True
) -> OwnAttention | None:
    """Return the first candidate that the trial confirms: with heads, then without.

    If a module cannot be run alone, its separate projections are recognized by name, if `by_name`.
    """
    for heads in dict.fromkeys((_heads(part, names, out), _one_head(part, names, out))):
        if heads is None:
            continue
        for is_interleaved in (False, True) if len(names) == 1 and heads.query > 1 else (False,):
            behaves_as_attention = _behaves_as_attention(part, names, out, heads, is_interleaved)
            if behaves_as_attention is None:  # it cannot be run alone
                is_named = by_name and len(names) == 3 and _fits(part, names, out)
                return OwnAttention(names, out, None) if is_named else None
            if behaves_as_attention:
                certain = _count(part, NUM_HEADS) == heads.query
                return OwnAttention(
                    names, out, heads if certain or len(names) == 1 else None, is_interleaved, certain
                )
    return None


def _count(part: nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the number that the module's attributes agree on."""
    counts = {getattr(part, name, None) for name in names if isinstance(getattr(part, name, None), int)}
    return counts.pop() if len(counts) == 1 else None


def _heads(part: Any, names: tuple[str, ...], out: str) -> HeadCounts | None:
    """Return the heads by the module's attributes, if all widths fit."""
    h, width = _count(part, NUM_HEADS), part.get_submodule(out).in_features
    if h is None or h < 1 or width % h:
        return None
    size, rows = width // h, [part.get_submodule(name).out_features for name in names]
    if len(rows) == 1:
        remaining = rows[0] - width
        g = remaining // (2 * size)
        fits = remaining > 0 and remaining == 2 * size * g
    else:
        g = rows[1] // size
        fits = rows == [width, g * size, g * size]
    num_kv_heads = _count(part, NUM_KV_HEADS)
    if not fits or not g or h % g or num_kv_heads not in (None, g):
        return None
    return HeadCounts(h, g, size)


def _one_head(part: Any, names: tuple[str, ...], out: str) -> HeadCounts | None:
    """Return all columns as one head, if Q, K, V and the input of the output layer have equal widths."""
    width, rows = part.get_submodule(out).in_features, [part.get_submodule(n).out_features for n in names]
    return HeadCounts(1, 1, width) if rows in ([width] * 3, [3 * width]) else None


def _fits(part: Any, names: tuple[str, ...], out: str) -> bool:
    return _heads(part, names, out) is not None or _one_head(part, names, out) is not None


def _columns(
    heads: HeadCounts, names: tuple[str, ...], is_interleaved: bool
) -> dict[str, list[tuple[int, Tensor]]]:
    """Return the projection and its columns for each of Q, K, V and each head."""
    columns, start = {}, 0
    for i, x in enumerate("QKV"):
        n, k = heads.of(x), heads.size
        if is_interleaved:
            columns[x] = [(0, torch.arange(k) + (3 * j + i) * k) for j in range(n)]
            continue
        start = 0 if len(names) == 3 else start
        columns[x] = [(i if len(names) == 3 else 0, torch.arange(k) + start + j * k) for j in range(n)]
        start += n * k
    return columns


@torch.no_grad()
def _behaves_as_attention(
    part: nn.Module, names: tuple[str, ...], out: str, heads: HeadCounts, is_interleaved: bool
) -> bool | None:
    """Return True if the module behaves as attention with these columns; None if it cannot be run alone."""
    columns = _columns(heads, names, is_interleaved)
    changes = [(x, j, at, cols) for x in "QKV" for j, (at, cols) in enumerate(columns[x])]
    changes += [(x, j, at, cols[:1]) for x in "KV" for j, (at, cols) in enumerate(columns[x])]
    try:
        y = _output_layer_inputs(part, names, out, [(at, cols) for _, _, at, cols in changes])
    except Exception:  # the user's code may raise anything: it has another form, or expects other inputs
        return None
    if y is None or y.shape[2] != heads.query * heads.size:
        return False
    limit = {torch.float64: 1e-10, torch.float32: 1e-5}.get(y.dtype, 2e-2) * float(y.abs().max())
    changed = ((y[1:] - y[0]).abs() > limit).unflatten(-1, (heads.query, heads.size))  # (changes, T, h, k)
    group, num_whole = heads.query // heads.key, heads.query + 2 * heads.key
    for i, (x, j, _, _) in enumerate(changes):
        readers = [j] if x == "Q" else list(range(j * group, (j + 1) * group))
        other_heads = [t for t in range(heads.query) if t not in readers]
        at_position, at_others = (
            changed[i, AT][readers],
            changed[i, [t for t in range(T) if t != AT]][:, readers],
        )
        if (
            bool(changed[i][:, other_heads].any())
            or not bool(at_position.any())
            or bool(at_others.any()) == (x == "Q")
        ):
            return False
        if i >= num_whole and heads.size > 1:  # one column
            beyond = bool(changed[i][:, readers][..., 1:].any())
            if beyond == (x == "V"):
                return False
    return heads.size > 1  # with heads of one column, K and V cannot be distinguished


def _output_layer_inputs(
    part: nn.Module, names: tuple[str, ...], out: str, changes: list[tuple[int, Tensor]]
) -> Tensor | None:
    """Return the input of the output layer, (1 + changes, T, width): first unchanged, then per change."""
    copied: Any = without_hooks(part).double()  # the answer must not depend on the dtype
    reference = next(copied.parameters())
    recorded: list[Tensor] = []
    calls: list[int] = []

    def random(i: int, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator(0, i), dtype=torch.float64)
        return values.to(reference.device, reference.dtype)

    def replaced(i: int) -> Any:
        def hook(module: Any, _: Any, output: Tensor) -> Tensor:
            rows = random(i, 1, T, module.out_features).repeat(len(changes) + 1, 1, 1)
            calls.append(i)
            for row, (at, cols) in enumerate(changes, 1):
                if at == i:
                    rows[row, AT, cols] += random(9, T, len(cols))[AT] + 1
            if output.shape != rows.shape:
                raise ValueError("the projection has another layout")
            return rows

        return hook

    for i, name in enumerate(names):
        copied.get_submodule(name).register_forward_hook(replaced(i))
    copied.get_submodule(out).register_forward_pre_hook(lambda _, given: recorded.append(given[0]))
    width = copied.get_submodule(names[0]).in_features
    widths = {copied.get_submodule(name).in_features for name in names}
    if len(widths) > 1:
        raise ValueError("queries and keys come from sequences of different widths")
    x = random(8, 1, T, width).repeat(len(changes) + 1, 1, 1)
    copied(x, *_other_arguments(copied, x))
    if sorted(calls) != list(range(len(names))) or len(recorded) != 1:
        return None
    return recorded[0] if recorded[0].dim() == 3 and recorded[0].shape[:2] == x.shape[:2] else None


def without_hooks(part: nn.Module) -> nn.Module:
    """Return a copy in eval mode without hooks; raise ValueError if the parameters are sharded."""
    if any(hasattr(p, "placements") for p in part.parameters()):
        raise ValueError("a trial needs unsharded parameters")
    copied = copy.deepcopy(part).eval()
    for child in copied.modules():
        for hooks in (child._forward_hooks, child._forward_pre_hooks, child._backward_hooks):
            hooks.clear()
    return copied


def _other_arguments(part: nn.Module, x: Tensor) -> list[Any]:
    """Return the other arguments that the forward pass needs: the same sequence again, and no mask."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in list(inspect.signature(part.forward).parameters.values())[1:] if p.kind in kinds]
    return [None if "mask" in p.name else x for p in needed if p.default is inspect.Parameter.empty]


def takes_second_sequence(part: nn.Module) -> bool:
    """Return True if an argument of the forward names a second sequence, as in attention to an encoder."""
    return any(name in SECOND_SEQUENCE_NAMES for name in list(inspect.signature(part.forward).parameters)[1:])
