"""The words an adapter is written in: cuts of parameters, places of activations, and the family's facts.

A cut names a parameter and the axes of its entries, in the order they are stored:

    i  inputs      h  heads          p  parts packed side by side
    o  outputs     k  head size      1  an axis of length one
                                     e  experts

Letters joined together share one stored axis, the first letter slowest: the rows of GPT-NeoX's packed
matrix are "hpk" (head, then query/key/value, then head size), its columns "i". In a role of heads, W_Q, b_Q
and so on, "o" stands for "hk", and in W_O "i" does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from curvescope.models.running.exchange import Change
from curvescope.models.running.standins import GENERIC, Standin


@dataclass(frozen=True)
class Cut:
    """Which entries of which parameter make a block.

    `part` of `parts` along the axis p, or, when `stacked`, part 0, 1, 2 = Q, K, V of the
    n_heads + 2 n_kv_heads heads that lie along the axis h; another `order` of them is spelled out. `expert`
    is one of those along the axis e.
    """

    parameter: str
    axes: str
    part: int = 0
    parts: int = 1
    stacked: bool = False
    order: str = "QKV"
    expert: int = 0


def linear(parameter: str) -> Cut:
    """The weight of an `nn.Linear`, outputs × inputs."""
    return Cut(parameter, "o i")


def matrix(parameter: str) -> Cut:
    """A matrix stored inputs × outputs: a table of embeddings, GPT-2's Conv1D."""
    return Cut(parameter, "i o")


def vector(parameter: str) -> Cut:
    """A bias or a norm's gain."""
    return Cut(parameter, "o")


def patches(parameter: str) -> Cut:
    """The kernel (o, channels, p, p) of a convolution that cuts an image into patches; inputs flattened."""
    return Cut(parameter, "o i")


def packed(parameter: str, part: int) -> Cut:
    """Part 0, 1, 2 = Q, K, V of an `nn.Linear` whose rows are all heads of Q, then of K, then of V."""
    return Cut(parameter, "o i", part=part, stacked=True)


def conv1d_packed(parameter: str, part: int) -> Cut:
    """As `packed`, for the columns of a matrix stored inputs × outputs."""
    return Cut(parameter, "i o", part=part, stacked=True)


def packed_vector(parameter: str, part: int) -> Cut:
    """As `packed`, for a bias."""
    return Cut(parameter, "o", part=part, stacked=True)


def interleaved(parameter: str, part: int) -> Cut:
    """Part 0, 1, 2 = Q, K, V of an `nn.Linear` whose rows are head 0's Q, K, V, then head 1's, …"""
    return Cut(parameter, "hpk i", part=part, parts=3)


def interleaved_vector(parameter: str, part: int) -> Cut:
    """As `interleaved`, for a bias."""
    return Cut(parameter, "hpk", part=part, parts=3)


def slab(parameter: str, part: int, parts: int) -> Cut:
    """One of `parts` equal slabs of the rows of an `nn.Linear`, e.g. gate and up in one matrix."""
    return Cut(parameter, "po i", part=part, parts=parts)


def affine(role: str, module: str) -> dict[str, Cut]:
    """W_role and b_role of an `nn.Linear`."""
    return {f"W_{role}": linear(f"{module}.weight"), f"b_{role}": vector(f"{module}.bias")}


def norm(role: str, module: str) -> dict[str, Cut]:
    """Gain and shift of a norm; one without a shift has only the first."""
    return {f"{role}.g": vector(f"{module}.weight"), f"{role}.b": vector(f"{module}.bias")}


@dataclass(frozen=True)
class Place:
    """Where a sublayer's tensor is read: a module's first input, its output, or its second output."""

    module: str
    kind: Literal["input", "output", "second"]


def places(*, attention: str, query: str, out: str, ff_in: str, ff_out: str) -> dict[str, Place]:
    """The six places of a layer, from the modules beside them.

    `attention` returns (output, pattern); `query` and `ff_in` take the sublayer's input; `out` is W_O.
    """
    return {
        "attn.in": Place(query, "input"),
        "attn.pattern": Place(attention, "second"),
        "attn.heads": Place(out, "input"),
        "attn.out": Place(out, "output"),
        "ff.in": Place(ff_in, "input"),
        "ff.out": Place(ff_out, "output"),
    }


def _no_facts(config: Any) -> dict[str, Any]:
    return {}


def _no_settings(module: Any) -> list[Change]:
    return []


@dataclass(frozen=True)
class Family:
    """One architecture. Parameters and modules that are not there are passed over.

    Names in `stem`, `end` and `roles` are those of the body, which a model with a head holds as `base`;
    `roles`, `experts` (each once for every expert) and `places` are relative to `layer`; `head` holds whole
    names. A `decoder` behind the encoder has layers with `decoder_roles`. `norm` is where the norms stand,
    `config` says which of the configuration's entries hold a fact, and `facts` computes further ones.
    `float32` names what the family computes in float32 whatever its parameters are; in float64 these casts
    are left out (`models.double`). `settings` are changes of a module that hold while it is called, and
    `standins` what our kernels may stand in for.
    """

    base: str = ""
    layer: str = ""  # with {i}
    stem: Mapping[str, Cut] = field(default_factory=dict)
    roles: Mapping[str, Cut] = field(default_factory=dict)
    experts: Mapping[str, Cut] = field(default_factory=dict)
    decoder: str = ""  # with {i}
    decoder_roles: Mapping[str, Cut] = field(default_factory=dict)
    end: Mapping[str, Cut] = field(default_factory=dict)
    head: Mapping[str, Cut] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    norm: Literal["none", "pre", "post"] = "pre"
    norm_kind: Literal["layernorm", "rmsnorm"] = "layernorm"
    positions: Literal["learned", "rope", "relative", "sinusoidal", "none"] = "learned"
    causal: bool = True
    config: Mapping[str, str] = field(default_factory=dict)
    facts: Callable[[Any], dict[str, Any]] = _no_facts
    float32: tuple[str, ...] = ()
    settings: Callable[[Any], list[Change]] = _no_settings
    standins: tuple[Standin, ...] = GENERIC
    notes: tuple[str, ...] = ()
