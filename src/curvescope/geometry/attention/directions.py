"""Singular directions of every head of a layer, decoded: which tokens a head reads, looks for and writes."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import UsageError
from curvescope.core.result import Result, Tabular
from curvescope.geometry.attention.circuits import Circuit
from curvescope.geometry.attention.composition import copying_score
from curvescope.geometry.attention.heads import heads, without_svd
from curvescope.geometry.low_rank import Factored
from curvescope.geometry.roles import read_norm
from curvescope.geometry.vocabulary.decode import TopTokens, top_tokens
from curvescope.geometry.vocabulary.names import names_of
from curvescope.geometry.vocabulary.references import Reference, ReferenceKind, reference
from curvescope.models.model import Model

Sides = Literal[1, 2]
Written = Literal["logit", "embedding"]


@dataclass(frozen=True)
class Spectra(Result):
    """Singular values of one circuit (QK or VO) of all heads; rows end in nan after the rank."""

    singular_values: np.ndarray  # (H, r)
    rank: np.ndarray  # (H,)
    frobenius: np.ndarray  # (H,)
    effective_rank: np.ndarray  # (H,) exp of the entropy of s²
    num_99: np.ndarray  # (H,) first singular values that hold 99 % of Σ s² (of Σ s where that was asked for)
    coverage: np.ndarray  # (H, r) share of the first ones, of the same sum


@dataclass(frozen=True)
class Directions(Tabular):
    """Pairs of singular vectors of all heads, decoded; row p is pair `rank[p]` of head `head[p]`.

    Axis 1 of the token tables is the sign: both vectors of a pair are turned together so that side 0 is the
    one with the stronger tokens on the right, by the mean of its top scores less the mean of all; `sign` is
    −1 where that turned them. With one side there is only side 0, chosen by the single largest score.
    """

    circuit: str  # qk or vo
    head: np.ndarray  # (p,)
    rank: np.ndarray  # (p,) 0 is the largest singular value of its head
    singular_value: np.ndarray  # (p,)
    share: np.ndarray  # (p,) of its head's Σ s²
    sign: np.ndarray  # (p,)
    left: TopTokens  # (p, 2, k)
    right: TopTokens

    def table(self) -> Any:
        """One row per pair and side, its tokens joined by spaces."""
        rows = []
        for p in range(len(self.head)):
            for side in range(self.left.ids.shape[1]):
                row = {"circuit": self.circuit, "head": self.head[p], "rank": self.rank[p]}
                row |= {"singular_value": self.singular_value[p], "share": self.share[p], "side": "+-"[side]}
                for name, top in (("left", self.left), ("right", self.right)):
                    row[name] = " ".join(repr(token) for token in top.text[p][side])
                rows.append(row)
        return rows


@dataclass(frozen=True)
class HeadDirections(Result):
    """The circuits of a layer in tokens, and their spectra."""

    layer: int
    num_heads: int
    qk: Directions
    vo: Directions
    qk_spectra: Spectra
    vo_spectra: Spectra
    key_bias: TopTokens  # (H, 2, k) tokens that every query of a head prefers or avoids
    query_bias: TopTokens | None  # if asked for: softmax cancels it
    key_bias_size: np.ndarray  # (H,) |k₀|
    bias_share: np.ndarray  # (H,) of the key score's variance, from b̂_Q
    copying: np.ndarray  # (H,) Re Σλ / Σ|λ| of the value-output matrix as stored
    folded: bool
    foldable: bool
    offset: float  # of rotary positions
    notes: list[str]
    legacy: InitVar[object] = None  # of saved results, which may have it; says nothing


def decode_heads(
    model: Model,
    layer: int,
    *,
    k: int = 5,
    num: int | None = 20,
    folded: bool = True,
    offset: float = 0.0,
    sides: Sides = 2,
    written: Written = "logit",
    query_bias: bool = False,
    energy: bool = True,
    tokenizer: Any = None,
) -> HeadDirections:
    """Singular directions of W_QK and W_VO of all heads of a layer as tokens, on both sides.

    QK is compared with the embedding on the sphere of the norm that attention reads (left: queries, right:
    keys), VO with it on the left and with the logit directions P(γ_f ∘ u_t), less their mean, on the right.
    Directions beyond the rank of a matrix are never listed.

    Args:
        k: tokens per side.
        num: largest singular values per head; None is all.
        folded: see `heads`.
        offset: query's position less the key's, for rotary positions.
        sides: 2 lists tokens of v and −v, 1 only those of the side with the single largest score.
        written: what VO is compared with on the right: `logit` directions, or the input `embedding` as it is.
        query_bias: decode scale Ŵ_Q b̂_K as well, which softmax cancels.
        energy: coverage counts s², False counts s.
    """
    _check(k, num, sides, written)
    names = names_of(model.tokenizer if tokenizer is None else tokenizer)
    own = heads(model, layer, folded=folded)
    read, write = _references(model, layer, own[0], written, names)
    qk = [c.qk if offset == 0 or c.rotary is None else c.qk_at(offset) for c in own]
    vo = [c.vo for c in own]
    biases = [torch.stack([c.key_bias for c in own])]
    biases += [torch.stack([c.query_bias for c in own])] if query_bias else []
    options = {"k": k, "tokenizer": names}
    decoded = _decode(qk, vo, biases, read, write, num, options)
    key = decoded["bias"][0]
    return HeadDirections(
        layer=layer,
        num_heads=len(own),
        qk=_pairs("qk", qk, decoded["qk"], num, sides, read),
        vo=_pairs("vo", vo, decoded["vo"], num, sides, write),
        qk_spectra=spectra(qk, energy=energy),
        vo_spectra=spectra(vo, energy=energy),
        key_bias=key,
        query_bias=decoded["bias"][1] if query_bias else None,
        key_bias_size=biases[0].norm(dim=1).numpy(),
        bias_share=np.array([c.bias_share() for c in own]),
        copying=np.array([copying_score(raw.vo) for raw in without_svd(model, layer, folded=False)]),
        folded=own[0].folded,
        foldable=own[0].foldable,
        offset=float(offset),
        notes=[note for note in own[0].note.split("; ") if note],
    )


def spectra(factors: list[Factored], *, energy: bool = True) -> Spectra:
    """Singular values of several matrices side by side; coverage counts s² (s without `energy`)."""
    width = max((f.rank for f in factors), default=0)
    values, cover = (np.full((len(factors), width), np.nan) for _ in range(2))
    for i, f in enumerate(factors):
        values[i, : f.rank] = f.singular_values.numpy()
        cover[i, : f.rank] = f.coverage(energy=energy).numpy()
    return Spectra(
        values,
        np.array([f.rank for f in factors]),
        np.array([f.frobenius for f in factors]),
        np.array([f.effective_rank for f in factors]),
        np.array([f.num_for(0.99, energy=energy) for f in factors]),
        cover,
    )


def _check(k: int, num: int | None, sides: int, written: str) -> None:
    if k < 1 or (num is not None and num < 1):
        raise UsageError(f"expected k and num of at least 1, got {k} and {num}")
    if sides not in (1, 2):
        raise UsageError(f"sides: expected 1 or 2, got {sides!r}")
    if written not in ("logit", "embedding"):
        raise UsageError(f"written: expected logit or embedding, got {written!r}")


def _references(
    model: Model, layer: int, head: Circuit, written: Written, names: Any
) -> tuple[Reference, Reference]:
    """Return the references for directions that are read (queries, keys, sources) and written."""
    options: dict[str, Any] = {"tokenizer": names}
    norm, _ = read_norm(model, layer)
    kind: ReferenceKind = "sphere" if head.folded else "normed" if norm.kind != "none" else "raw"
    read = reference(model, kind, norm=norm.name or None, **options)
    if written == "embedding":
        return read, reference(model, "raw", **options)
    return read, reference(model, "logit", centered=True, **options)


def _decode(
    qk: list[Factored],
    vo: list[Factored],
    biases: list[Tensor],
    read: Reference,
    write: Reference,
    num: int | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Decode every direction twice over the vocabulary, as read and as written."""
    parts = {
        "qk left": [f.left.T[:num] for f in qk],
        "qk right": [f.right.T[:num] for f in qk],
        "vo left": [f.left.T[:num] for f in vo],
        "bias": biases,
    }
    rows = torch.cat([part for group in parts.values() for part in group])
    found = top_tokens(rows, read, **options)
    cut, start = {}, 0
    for name, group in parts.items():
        sizes = [sum(len(part) for part in group)] if name != "bias" else [len(part) for part in group]
        cut[name] = []
        for size in sizes:
            cut[name].append(_slice(found, slice(start, start + size)))
            start += size
    written = top_tokens(torch.cat([f.right.T[:num] for f in vo]), write, **options)
    return {
        "qk": (cut["qk left"][0], cut["qk right"][0]),
        "vo": (cut["vo left"][0], written),
        "bias": cut["bias"],
    }


def _pairs(
    name: str,
    factors: list[Factored],
    found: tuple[TopTokens, TopTokens],
    num: int | None,
    sides: Sides,
    right: Reference,
) -> Directions:
    """Pairs with their sign chosen."""
    counts = [len(f.singular_values[:num]) for f in factors]
    vectors = torch.cat([f.right.T[:num] for f in factors])
    flip = _flips(found[1], vectors, right, sides)
    left, right_tokens = (_turned(top, flip, sides) for top in found)
    return Directions(
        circuit=name,
        head=np.repeat(np.arange(len(factors)), counts),
        rank=np.concatenate([np.arange(c) for c in counts]),
        singular_value=torch.cat([f.singular_values[:num] for f in factors]).numpy(),
        share=torch.cat([f.energy_share[:num] for f in factors]).numpy(),
        sign=np.where(flip, -1, 1),
        left=left,
        right=right_tokens,
    )


def _flips(top: TopTokens, vectors: Tensor, right: Reference, sides: Sides) -> np.ndarray:
    """Return True if the negative side is the stronger one: (p,)."""
    if sides == 1:
        return top.scores[:, 1, 0] > top.scores[:, 0, 0]
    middle = np.zeros(len(vectors)) if right.centered else (vectors @ right.mean).numpy()
    return top.scores[:, 1].mean(-1) + middle > top.scores[:, 0].mean(-1) - middle


def _turned(top: TopTokens, flip: np.ndarray, sides: Sides) -> TopTokens:
    """The first `sides` sides in the order that the sign asks for."""
    index = np.where(flip[:, None], [[1, 0]], [[0, 1]])[:, :sides]
    row = np.arange(len(flip))[:, None]
    arrays = {name: getattr(top, name)[row, index] for name in ("ids", "scores", "cosine", "fraction")}
    lists = {
        name: [[getattr(top, name)[p][side] for side in index[p]] for p in range(len(flip))]
        for name in ("text", "bytes")
    }
    return replace(top, **arrays, **lists)


def _slice(top: TopTokens, part: slice) -> TopTokens:
    """Some of the directions."""
    names = ("ids", "scores", "cosine", "fraction", "text", "bytes")
    return replace(top, **{name: getattr(top, name)[part] for name in names})
