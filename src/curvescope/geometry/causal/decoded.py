"""Directions at a named point as tokens: whose logits they raise on the direct path to the unembedding.

Singular directions of a layer's weights, each at the point where it is read or written.

    vo          written by a head, at `L.attn.out`: right vectors of W_VO
    query, key  read by a head, at `L.in`: left and right vectors of W_QK
    ff out      written by the feed-forward network, at `L.ff.out`: right vectors of W_2
    ff in       read by it, at `L.mid`: left vectors of W_1 (of the gate W_g), with the norm folded in

What is read is found behind the norm, n(x); along a direction that the norm keeps, x and n(x) are the same
up to scale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.geometry.attention.heads import heads
from curvescope.geometry.roles import has_lens, norm_kind, norm_of, weight
from curvescope.geometry.sphere import fold, project
from curvescope.geometry.vocabulary.decode import TopTokens, top_tokens
from curvescope.geometry.vocabulary.references import Reference, reference
from curvescope.models.capture.activation_points import block_paths
from curvescope.models.forward_errors import check_vocabulary
from curvescope.models.model import Model
from curvescope.problem import Problem

HEAD = re.compile(r"L(\d+)\.h(\d+)\.out")
HEADS = re.compile(r"L(\d+)\.attn\.heads")


def decode_at(model: Model, at: str, directions: Tensor, *, k: int = 5) -> TopTokens:
    """The tokens whose logits a step along each direction (m, w) raises most, and lowers most (axis 1).

    A step u of the stream moves the logit of t by P(γ ∘ u_t) · u, up to the scale of the last norm, if
    nothing in between responds; at `final` by u_t · u; what a head gives goes through its W_O first. Logits
    are taken less their mean over the vocabulary, which the softmax does not see.

    Args:
        model: One with a vocabulary.
        at: The point that the directions are of.
        directions: One in each row.
        k: Tokens on each side.
    """
    return top_tokens(in_stream(model, at, directions), written(model, at), k=k, tokenizer=model.tokenizer)


def in_stream(model: Model, at: str, directions: Tensor) -> Tensor:
    """Directions (m, w) of a point as what they add to the stream: (m, d), in float64 on the CPU."""
    v = torch.as_tensor(directions).detach().double().cpu()
    head, heads = HEAD.fullmatch(at), HEADS.fullmatch(at)
    if head or heads:
        name = f"L{head[1]}.h{head[2]}.W_O" if head else f"L{heads[1]}.W_O" if heads else ""
        W_O = weight(model, name)
        if W_O is None:
            raise UsageError(f"expected a model whose W_O is known, {model.name!r} has no {name}")
        return v @ W_O.double()
    d = model.facts.get("d_model")
    if v.dim() != 2 or v.shape[1] != d:
        raise ShapeError(f"expected directions (m, {d}) of the stream at {at!r}, got {tuple(v.shape)}")
    return v


def written(model: Model, at: str) -> Reference:
    """Return the reference for directions at a point: rows of tokens, minus their mean."""
    check_vocabulary(model)
    if at == "final":
        return reference(model, "raw", which="output", centered=True)
    return reference(model, "logit", centered=True)


def direct_change(problem: Problem, at: str, directions: Tensor, ids: Tensor) -> Tensor:
    """Change of the logits of tokens ids (m, k) by a step along each direction (m, w), on the direct path.

    The products that `decode_at` ranks tokens by, times the scale 1/√(|Px|²/d + ε) of the last norm, held
    fixed, in the mean over the tokens of the data; logits are taken less their mean over the vocabulary.
    Effects of the step through other layers are left out.
    """
    model = problem.model
    rows = written(model, at)
    places = torch.searchsorted(rows.ids, ids.contiguous())
    own = rows.rows(places.flatten()).view(*ids.shape, -1)
    found = (own * in_stream(model, at, directions)[:, None]).sum(-1)
    return found if at == "final" or not has_lens(model) else found * _mean_scale(problem)


def _mean_scale(problem: Problem) -> float:
    """The mean over tokens of 1/√(|Px|²/d + ε) at the last norm."""
    norm, last = norm_of(problem.model, "ln_f"), f"L{len(block_paths(problem.model)) - 1}.out"
    found = []
    for batch in problem.placed_batches("scale of the last norm"):
        x = project(problem.activations(batch, last)[last].double(), kind=norm.kind)
        found.append(torch.rsqrt(x.square().mean(-1) + norm.eps).flatten().cpu())
    return float(torch.cat(found).mean())


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
