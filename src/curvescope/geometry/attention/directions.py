"""Decode the singular directions of every head of a layer: tokens that it reads, looks for and writes."""

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
from curvescope.geometry.vocabulary.references import ReferenceKind, TokenReference, reference
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
    num_99: np.ndarray  # (H,) number of singular values with 99 % of Σ s² (of Σ s if `energy=False`)
    coverage: np.ndarray  # (H, r) share of the first singular values in the same sum


@dataclass(frozen=True)
class Directions(Tabular):
    """Pairs of singular vectors of all heads, decoded; row p is pair `rank[p]` of head `head[p]`.

    Axis 1 of the token tables is the sign. Side 0 has the stronger tokens on the right, by the mean of its
    top scores minus the mean of all scores. `sign` is −1 if both vectors were negated for that. With one side
    there is only side 0, chosen by the single largest score.
    """

    circuit: str  # qk or vo
    head: np.ndarray  # (p,)
    rank: np.ndarray  # (p,) 0 is the largest singular value of its head
    singular_value: np.ndarray  # (p,)
    share: np.ndarray  # (p,) share in its head's Σ s²
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
    """The circuits of a layer decoded into tokens, and their spectra."""

    layer: int
    num_heads: int
    qk: Directions
    vo: Directions
    qk_spectra: Spectra
    vo_spectra: Spectra
    key_bias: TopTokens  # (H, 2, k) tokens that every query of a head prefers or avoids
    query_bias: TopTokens | None  # optional, because the softmax cancels it
    key_bias_size: np.ndarray  # (H,) |k₀|
    bias_share: np.ndarray  # (H,) share of b̂_Q in the variance of the key's score
    copying: np.ndarray  # (H,) Re Σλ / Σ|λ| of the value-output matrix as stored
    folded: bool
    foldable: bool
    offset: float  # offset of rotary positions
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
    """Decode the singular directions of W_QK and W_VO of all heads of a layer into tokens, on both sides.

    QK is compared with the embedding on the sphere of the norm that attention reads (left: queries, right:
    keys). VO is compared with the same embedding on the left, and on the right with the logit directions
    P(γ_f ∘ u_t) minus their mean. Directions beyond the rank of a matrix are never listed.

    Args:
        k: tokens per side.
        num: number of the largest singular values per head; None is all.
        folded: see `heads`.
        offset: position of the query minus that of the key, for rotary positions.
        sides: 2 lists tokens of v and −v, 1 only those of the side with the single largest score.
        written: compare VO on the right with `logit` directions, or with the input `embedding`.
        query_bias: also decode scale Ŵ_Q b̂_K, which the softmax cancels.
        energy: coverage counts s², False counts s.
    """
    _check(k, num, sides, written)
    names = names_of(model.tokenizer if tokenizer is None else tokenizer)
    circuits = heads(model, layer, folded=folded)
    read_rows, written_rows = _references(model, layer, circuits[0], written, names)
    qk = [c.qk if offset == 0 or c.rotary is None else c.qk_at(offset) for c in circuits]
    vo = [c.vo for c in circuits]
    biases = [torch.stack([c.key_bias for c in circuits])]
    biases += [torch.stack([c.query_bias for c in circuits])] if query_bias else []
    options = {"k": k, "tokenizer": names}
    decoded = _decode(qk, vo, biases, read_rows, written_rows, num, options)
    key = decoded["bias"][0]
    return HeadDirections(
        layer=layer,
        num_heads=len(circuits),
        qk=_pairs("qk", qk, decoded["qk"], num, sides, read_rows),
        vo=_pairs("vo", vo, decoded["vo"], num, sides, written_rows),
        qk_spectra=spectra(qk, energy=energy),
        vo_spectra=spectra(vo, energy=energy),
        key_bias=key,
        query_bias=decoded["bias"][1] if query_bias else None,
        key_bias_size=biases[0].norm(dim=1).numpy(),
        bias_share=np.array([c.bias_share() for c in circuits]),
        copying=np.array([copying_score(raw.vo) for raw in without_svd(model, layer, folded=False)]),
        folded=circuits[0].folded,
        foldable=circuits[0].foldable,
        offset=float(offset),
        notes=[note for note in circuits[0].note.split("; ") if note],
    )


def spectra(factors: list[Factored], *, energy: bool = True) -> Spectra:
    """Return the spectra of several matrices; the coverage sums s² (s without `energy`)."""
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
) -> tuple[TokenReference, TokenReference]:
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
    read: TokenReference,
    write: TokenReference,
    num: int | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Decode every direction over the vocabulary: those that are read, and those that are written."""
    parts = {
        "qk left": [f.left.T[:num] for f in qk],
        "qk right": [f.right.T[:num] for f in qk],
        "vo left": [f.left.T[:num] for f in vo],
        "bias": biases,
    }
    rows = torch.cat([part for group in parts.values() for part in group])
    tokens = top_tokens(rows, read, **options)
    slices, start = {}, 0
    for name, group in parts.items():
        sizes = [sum(len(part) for part in group)] if name != "bias" else [len(part) for part in group]
        slices[name] = []
        for size in sizes:
            slices[name].append(_slice(tokens, slice(start, start + size)))
            start += size
    written = top_tokens(torch.cat([f.right.T[:num] for f in vo]), write, **options)
    return {
        "qk": (slices["qk left"][0], slices["qk right"][0]),
        "vo": (slices["vo left"][0], written),
        "bias": slices["bias"],
    }


def _pairs(
    name: str,
    factors: list[Factored],
    tokens: tuple[TopTokens, TopTokens],
    num: int | None,
    sides: Sides,
    right: TokenReference,
) -> Directions:
    """Return the decoded pairs with their sign chosen."""
    counts = [len(f.singular_values[:num]) for f in factors]
    vectors = torch.cat([f.right.T[:num] for f in factors])
    is_flipped = _is_negative_stronger(tokens[1], vectors, right, sides)
    left, right_tokens = (_ordered_sides(top, is_flipped, sides) for top in tokens)
    return Directions(
        circuit=name,
        head=np.repeat(np.arange(len(factors)), counts),
        rank=np.concatenate([np.arange(c) for c in counts]),
        singular_value=torch.cat([f.singular_values[:num] for f in factors]).numpy(),
        share=torch.cat([f.energy_share[:num] for f in factors]).numpy(),
        sign=np.where(is_flipped, -1, 1),
        left=left,
        right=right_tokens,
    )


def _is_negative_stronger(top: TopTokens, vectors: Tensor, right: TokenReference, sides: Sides) -> np.ndarray:
    """Return True if the negative side is the stronger one: (p,)."""
    if sides == 1:
        return top.scores[:, 1, 0] > top.scores[:, 0, 0]
    middle = np.zeros(len(vectors)) if right.centered else (vectors @ right.mean).numpy()
    return top.scores[:, 1].mean(-1) + middle > top.scores[:, 0].mean(-1) - middle


def _ordered_sides(top: TopTokens, is_flipped: np.ndarray, sides: Sides) -> TopTokens:
    """Return the first `sides` sides, in the order given by the sign."""
    index = np.where(is_flipped[:, None], [[1, 0]], [[0, 1]])[:, :sides]
    row = np.arange(len(is_flipped))[:, None]
    arrays = {name: getattr(top, name)[row, index] for name in ("ids", "scores", "cosine", "fraction")}
    lists = {
        name: [[getattr(top, name)[p][side] for side in index[p]] for p in range(len(is_flipped))]
        for name in ("text", "bytes")
    }
    return replace(top, **arrays, **lists)


def _slice(top: TopTokens, part: slice) -> TopTokens:
    """Return some of the directions."""
    names = ("ids", "scores", "cosine", "fraction", "text", "bytes")
    return replace(top, **{name: getattr(top, name)[part] for name in names})
