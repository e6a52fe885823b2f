"""Singular directions of a layer's weights, each at the point where it is read or written.

    vo          written by a head, at `L.attn.out`: right vectors of W_VO
    query, key  read by a head, at `L.in`: left and right vectors of W_QK
    ff out      written by the feed-forward network, at `L.ff.out`: right vectors of W_2
    ff in       read by it, at `L.mid`: left vectors of W_1 (of the gate W_g), with the norm folded in

What is read is found behind the norm, n(x); along a direction that the norm keeps, x and n(x) are the same
up to scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from curvescope.geometry.attention.heads import heads
from curvescope.geometry.roles import norm_kind, norm_of, weight
from curvescope.geometry.sphere import fold
from curvescope.models.model import Model

Kind = Literal["vo", "query", "key", "ff out", "ff in"]
KINDS: tuple[Kind, ...] = ("vo", "query", "key", "ff out", "ff in")


@dataclass(frozen=True, eq=False)
class Direction:
    """A unit vector (w,) in float64 at a point, the `rank`-th of its matrix; a whole layer has no `head`."""

    kind: Kind
    layer: int
    head: int | None
    rank: int
    singular_value: float
    at: str
    vector: Tensor

    @property
    def name(self) -> str:
        """`L2.h1.vo.0`, `L2.ff out.0`."""
        own = f"L{self.layer}" if self.head is None else f"L{self.layer}.h{self.head}"
        return f"{own}.{self.kind}.{self.rank}"


def layer_directions(model: Model, layer: int, *, num: int = 1) -> list[Direction]:
    """The `num` largest singular directions of every head and of the feed-forward network of a layer."""
    found = []
    for circuit in heads(model, layer):
        sides: list[tuple[Kind, str, Tensor, Tensor]] = [
            ("vo", f"L{layer}.attn.out", circuit.vo.right, circuit.vo.singular_values),
            ("query", f"L{layer}.in", circuit.qk.left, circuit.qk.singular_values),
            ("key", f"L{layer}.in", circuit.qk.right, circuit.qk.singular_values),
        ]
        for kind, at, vectors, s in sides:
            found += _ranked(kind, layer, circuit.head, at, vectors, s, num)
    return [*found, *_feed_forward(model, layer, num)]


def _ranked(
    kind: Kind, layer: int, head: int | None, at: str, vectors: Tensor, s: Tensor, num: int
) -> list[Direction]:
    """The first columns of some vectors (d, r)."""
    return [
        Direction(kind, layer, head, r, float(s[r]), at, vectors[:, r].double())
        for r in range(min(num, len(s)))
    ]


def _feed_forward(model: Model, layer: int, num: int) -> list[Direction]:
    """None where the layer has no feed-forward network that is known."""
    into = next((W for role in ("W_1", "W_g") if (W := weight(model, f"L{layer}.{role}")) is not None), None)
    out = weight(model, f"L{layer}.W_2")
    if into is None or out is None:
        return []
    into = into.double()
    if model.facts.get("norm") == "pre" and norm_kind(model) != "none":
        norm = norm_of(model, f"L{layer}.ln2")
        into, _ = fold(into, gamma=norm.gamma, beta=norm.beta, kind=norm.kind)
    read = f"L{layer}.in" if model.facts.get("parallel") else f"L{layer}.mid"
    U, s, _ = torch.linalg.svd(into, full_matrices=False)
    _, t, Vh = torch.linalg.svd(out.double(), full_matrices=False)
    return [
        *_ranked("ff out", layer, None, f"L{layer}.ff.out", Vh.T, t, num),
        *_ranked("ff in", layer, None, read, U, s, num),
    ]
