"""Decode directions at a named point into the tokens whose logits they raise on the direct path.

Singular directions of a layer's weights belong to the point where they are read or written:

    vo          written by a head, at `L.attn.out`: right vectors of W_VO
    query, key  read by a head, at `L.in`: left and right vectors of W_QK
    ff out      written by the feed-forward network, at `L.ff.out`: right vectors of W_2
    ff in       read by it, at `L.mid`: left vectors of W_1 (of the gate W_g), with the norm folded in

Directions that are read act on n(x), after the norm. Along such a direction x and n(x) agree up to scale.
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
from curvescope.geometry.vocabulary.references import TokenReference, reference
from curvescope.models.capture.activation_points import block_paths
from curvescope.models.forward_errors import check_vocabulary
from curvescope.models.model import Model
from curvescope.problem import Problem

HEAD = re.compile(r"L(\d+)\.h(\d+)\.out")
HEADS = re.compile(r"L(\d+)\.attn\.heads")


def decode_at(model: Model, at: str, directions: Tensor, *, k: int = 5) -> TopTokens:
    """Return the tokens whose logits a step along each direction (m, w) raises most and lowers most (axis 1).

    On the direct path, a step u of the stream changes the logit of t by P(γ ∘ u_t) · u, up to the scale of
    the last norm, and at `final` by u_t · u. The output of a head first passes its W_O. The mean over the
    vocabulary is subtracted from the logits, which does not change the softmax.

    Args:
        model: A model with a vocabulary.
        at: The point of the directions.
        directions: One direction per row.
        k: Number of tokens on each side.
    """
    return top_tokens(
        as_stream_directions(model, at, directions), token_rows_at(model, at), k=k, tokenizer=model.tokenizer
    )


def as_stream_directions(model: Model, at: str, directions: Tensor) -> Tensor:
    """Return what directions (m, w) at a point add to the stream: (m, d), in float64 on the CPU."""
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


def token_rows_at(model: Model, at: str) -> TokenReference:
    """Return the reference for directions at a point: rows of tokens, minus their mean."""
    check_vocabulary(model)
    if at == "final":
        return reference(model, "raw", which="output", centered=True)
    return reference(model, "logit", centered=True)


def direct_change(problem: Problem, at: str, directions: Tensor, ids: Tensor) -> Tensor:
    """Return the change of the logits of tokens ids (m, k) by a step along each direction (m, w).

    These are the products that rank the tokens in `decode_at`, times the mean scale 1/√(|Px|²/d + ε) of the
    last norm over the tokens of the data. The mean over the vocabulary is subtracted from the logits. Effects
    through other layers are not included.
    """
    model = problem.model
    rows = token_rows_at(model, at)
    positions = torch.searchsorted(rows.ids, ids.contiguous())
    token_rows = rows.rows(positions.flatten()).view(*ids.shape, -1)
    products = (token_rows * as_stream_directions(model, at, directions)[:, None]).sum(-1)
    return products if at == "final" or not has_lens(model) else products * _mean_scale(problem)


def _mean_scale(problem: Problem) -> float:
    """Return the mean over tokens of 1/√(|Px|²/d + ε) at the last norm."""
    norm, last_point = norm_of(problem.model, "ln_f"), f"L{len(block_paths(problem.model)) - 1}.out"
    scales = []
    for batch in problem.placed_batches("scale of the last norm"):
        x = project(problem.activations(batch, last_point)[last_point].double(), kind=norm.kind)
        scales.append(torch.rsqrt(x.square().mean(-1) + norm.eps).flatten().cpu())
    return float(torch.cat(scales).mean())


Kind = Literal["vo", "query", "key", "ff out", "ff in"]
KINDS: tuple[Kind, ...] = ("vo", "query", "key", "ff out", "ff in")


@dataclass(frozen=True, eq=False)
class SingularDirection:
    """Unit vector (w,) in float64 at a point, the `rank`-th of its matrix; `head` is None for a layer."""

    kind: Kind
    layer: int
    head: int | None
    rank: int
    singular_value: float
    at: str
    vector: Tensor

    @property
    def name(self) -> str:
        """Name such as `L2.h1.vo.0` or `L2.ff out.0`."""
        prefix = f"L{self.layer}" if self.head is None else f"L{self.layer}.h{self.head}"
        return f"{prefix}.{self.kind}.{self.rank}"


def layer_directions(model: Model, layer: int, *, num: int = 1) -> list[SingularDirection]:
    """Return the `num` largest singular directions of every head and of the feed-forward of a layer."""
    directions_of_layer = []
    for circuit in heads(model, layer):
        sides: list[tuple[Kind, str, Tensor, Tensor]] = [
            ("vo", f"L{layer}.attn.out", circuit.vo.right, circuit.vo.singular_values),
            ("query", f"L{layer}.in", circuit.qk.left, circuit.qk.singular_values),
            ("key", f"L{layer}.in", circuit.qk.right, circuit.qk.singular_values),
        ]
        for kind, at, vectors, s in sides:
            directions_of_layer += _ranked(kind, layer, circuit.head, at, vectors, s, num)
    return [*directions_of_layer, *_feed_forward(model, layer, num)]


def _ranked(
    kind: Kind, layer: int, head: int | None, at: str, vectors: Tensor, s: Tensor, num: int
) -> list[SingularDirection]:
    """Return the first `num` columns of vectors (d, r) as directions."""
    return [
        SingularDirection(kind, layer, head, r, float(s[r]), at, vectors[:, r].double())
        for r in range(min(num, len(s)))
    ]


def _feed_forward(model: Model, layer: int, num: int) -> list[SingularDirection]:
    """Return the directions of the feed-forward network; none if its roles are unknown."""
    W_in = next((W for role in ("W_1", "W_g") if (W := weight(model, f"L{layer}.{role}")) is not None), None)
    W_out = weight(model, f"L{layer}.W_2")
    if W_in is None or W_out is None:
        return []
    W_in = W_in.double()
    if model.facts.get("norm") == "pre" and norm_kind(model) != "none":
        norm = norm_of(model, f"L{layer}.ln2")
        W_in, _ = fold(W_in, gamma=norm.gamma, beta=norm.beta, kind=norm.kind)
    read_point = f"L{layer}.in" if model.facts.get("parallel") else f"L{layer}.mid"
    U, s, _ = torch.linalg.svd(W_in, full_matrices=False)
    _, t, Vh = torch.linalg.svd(W_out.double(), full_matrices=False)
    return [
        *_ranked("ff out", layer, None, f"L{layer}.ff.out", Vh.T, t, num),
        *_ranked("ff in", layer, None, read_point, U, s, num),
    ]
