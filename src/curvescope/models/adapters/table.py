"""Elements of an adapter's table: slices of parameters, places of activations, and facts on the family.

A `ParameterSlice` names a parameter and the axes of its entries, in the order they are stored:

    i  inputs      h  heads          p  parts packed side by side
    o  outputs     k  head size      1  an axis of length one
                                     e  experts

Joined letters share one stored axis, the first letter varies slowest: the rows of GPT-NeoX's packed matrix
are "hpk" (head, then query/key/value, then head size), its columns "i". In roles with heads, "o" stands for
"hk" in W_Q, b_Q and so on, and "i" does in W_O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from curvescope.models.running.module_replacements import GENERIC, MethodReplacement
from curvescope.models.running.patching import Change


@dataclass(frozen=True)
class ParameterSlice:
    """Entries of a parameter that make a block.

    `part` is an index into the `parts` along the axis p. If `stacked`, parts 0, 1, 2 are Q, K, V of the
    n_heads + 2 n_kv_heads heads along the axis h, or follow `order`. `expert` is an index along the axis e.
    """

    parameter: str
    axes: str
    part: int = 0
    parts: int = 1
    stacked: bool = False
    order: str = "QKV"
    expert: int = 0


def linear(parameter: str) -> ParameterSlice:
    """Slice of the weight of an `nn.Linear`, outputs × inputs."""
    return ParameterSlice(parameter, "o i")


def matrix(parameter: str) -> ParameterSlice:
    """Slice of a matrix stored inputs × outputs: an embedding, or GPT-2's Conv1D."""
    return ParameterSlice(parameter, "i o")


def vector(parameter: str) -> ParameterSlice:
    """Slice of a bias or of a norm's gain."""
    return ParameterSlice(parameter, "o")


def patches(parameter: str) -> ParameterSlice:
    """Slice of the kernel (o, channels, p, p) of a convolution over patches, with flattened inputs."""
    return ParameterSlice(parameter, "o i")


def packed(parameter: str, part: int) -> ParameterSlice:
    """Part 0, 1, 2 = Q, K, V of an `nn.Linear` whose rows are all heads of Q, then of K, then of V."""
    return ParameterSlice(parameter, "o i", part=part, stacked=True)


def conv1d_packed(parameter: str, part: int) -> ParameterSlice:
    """Cut a packed matrix stored inputs × outputs by columns, like `packed`."""
    return ParameterSlice(parameter, "i o", part=part, stacked=True)


def packed_vector(parameter: str, part: int) -> ParameterSlice:
    """Cut a packed bias, like `packed`."""
    return ParameterSlice(parameter, "o", part=part, stacked=True)


def interleaved(parameter: str, part: int) -> ParameterSlice:
    """Part 0, 1, 2 = Q, K, V of an `nn.Linear` whose rows are head 0's Q, K, V, then head 1's, …"""
    return ParameterSlice(parameter, "hpk i", part=part, parts=3)


def interleaved_vector(parameter: str, part: int) -> ParameterSlice:
    """Cut an interleaved bias, like `interleaved`."""
    return ParameterSlice(parameter, "hpk", part=part, parts=3)


def slab(parameter: str, part: int, parts: int) -> ParameterSlice:
    """One of `parts` equal slabs of the rows of an `nn.Linear`, e.g. gate and up in one matrix."""
    return ParameterSlice(parameter, "po i", part=part, parts=parts)


def affine(role: str, module: str) -> dict[str, ParameterSlice]:
    """W_role and b_role of an `nn.Linear`."""
    return {f"W_{role}": linear(f"{module}.weight"), f"b_{role}": vector(f"{module}.bias")}


def norm(role: str, module: str) -> dict[str, ParameterSlice]:
    """Gain and shift of a norm; one without a shift has only the first."""
    return {f"{role}.g": vector(f"{module}.weight"), f"{role}.b": vector(f"{module}.bias")}


@dataclass(frozen=True)
class ActivationPlace:
    """Tensor of a sublayer: the first input of a module, its output, or its second output."""

    module: str
    kind: Literal["input", "output", "second"]


def places(*, attention: str, query: str, out: str, ff_in: str, ff_out: str) -> dict[str, ActivationPlace]:
    """Return the six places of a layer, given the modules next to them.

    `attention` returns (output, pattern). `query` and `ff_in` take the sublayer's input. `out` is W_O.
    """
    return {
        "attn.in": ActivationPlace(query, "input"),
        "attn.pattern": ActivationPlace(attention, "second"),
        "attn.heads": ActivationPlace(out, "input"),
        "attn.out": ActivationPlace(out, "output"),
        "ff.in": ActivationPlace(ff_in, "input"),
        "ff.out": ActivationPlace(ff_out, "output"),
    }


def _no_facts(config: Any) -> dict[str, Any]:
    return {}


def _no_settings(module: Any) -> list[Change]:
    return []


@dataclass(frozen=True)
class Family:
    """Table of one architecture. Entries without a parameter or module are ignored.

    Names in `stem`, `end` and `roles` are relative to the body, which a model with a head holds as `base`.
    `roles`, `experts` (once per expert) and `places` are relative to `layer`; `head` has full names. The
    layers of a `decoder` have `decoder_roles`. `norm` is the position of the norms, `config` maps facts to
    entries of the configuration, and `facts` computes more. `float32` names the parts that the family always
    computes in float32; in float64 these casts are skipped (`models.running.keep_float64`). `settings` are
    changes of a module during a call, and `replacements` the methods that our kernels may replace.
    """

    base: str = ""
    layer: str = ""  # with {i}
    stem: Mapping[str, ParameterSlice] = field(default_factory=dict)
    roles: Mapping[str, ParameterSlice] = field(default_factory=dict)
    experts: Mapping[str, ParameterSlice] = field(default_factory=dict)
    decoder: str = ""  # with {i}
    decoder_roles: Mapping[str, ParameterSlice] = field(default_factory=dict)
    end: Mapping[str, ParameterSlice] = field(default_factory=dict)
    head: Mapping[str, ParameterSlice] = field(default_factory=dict)
    places: Mapping[str, ActivationPlace] = field(default_factory=dict)
    norm: Literal["none", "pre", "post"] = "pre"
    norm_kind: Literal["layernorm", "rmsnorm"] = "layernorm"
    positions: Literal["learned", "rope", "relative", "sinusoidal", "none"] = "learned"
    causal: bool = True
    config: Mapping[str, str] = field(default_factory=dict)
    facts: Callable[[Any], dict[str, Any]] = _no_facts
    float32: tuple[str, ...] = ()
    settings: Callable[[Any], list[Change]] = _no_settings
    replacements: tuple[MethodReplacement, ...] = GENERIC
    notes: tuple[str, ...] = ()
