"""One head of an attention layer: its Jacobian and its functional Hessian, as sums over queries.

The score t_ij of query i and key j is linear in each weight: ∂t_ij/∂W_Q = x_i ⊗ s k_j and
∂t_ij/∂W_K = s x_j ⊗ q_i. The derivative in a score weight therefore consists of a vector of the query and a
feature of the keys, and everything below is a covariance or a third moment of features under the attention
weights of the query:

    Cov_i(f, g) = Σ_j A_ij f̃_ij g̃_ijᵀ,   C3_i(f, g) = Σ_j τ_ij f̃_ij g̃_ijᵀ,   f̃_ij = f_j − Σ_l A_il f_l,

τ_ij = A_ij (ρ_ij − ρ̄_i) with ρ_ij = G_i · v_j. The sums are over centered features, query by query, so that
they keep their digits when a query attends to one key only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from curvescope.closed_form.attention.layer import ROLE, AttentionLayer, rotate
from curvescope.closed_form.attention.terms import COLUMN, MAX_ENTRIES, ROW, FactoredTerm

MAX_CACHED = 1 << 20  # entries of a centered feature that is cached for the next moment


@dataclass(frozen=True)
class Feature:
    """A quantity of each key for each query: `at(queries)` is (n, l, S, size of `shape`)."""

    shape: tuple[int, ...]
    at: Callable[[slice], Tensor]


@dataclass(frozen=True)
class ScoreSide:
    """Derivative of the scores in a weight: query vectors, their index, and a feature of the keys."""

    vectors: Tensor | None  # (n L, ·)
    on: str  # "a", "c", or "" when nothing factors out
    feature: Feature


@dataclass(frozen=True)
class OutputJacobian:
    """∂F_i/∂W = spaceᵀ (vectors_i ⊗ core_i) with core (n L, v, rest) and a fixed map `space` (v, o).

    An absent core or map is the identity; `on` as in `ScoreSide`.
    """

    vectors: Tensor | None
    on: str
    core: Tensor | None
    space: Tensor | None


class AttentionHead:
    """Head number `index` of a layer, with the moments that its blocks consist of."""

    def __init__(self, layer: AttentionLayer, index: int):
        self.layer = layer
        self.A, self.slope, self.top = layer.A[:, index], layer.slope[:, index], layer.top[:, index]
        self.q, self.k, self.v = layer.q[:, index], layer.k[:, index], layer.v[:, index]
        self.tau, self.G, self.out = layer.tau[:, index], layer.G_heads[:, index], layer.heads_out[:, index]
        W_O = layer.weights.get("O")
        self.W_O = None if W_O is None else W_O.unflatten(0, (layer.num_heads, -1))[index]
        self._sides: dict[str, ScoreSide] = {}
        self._inputs: dict[str, Feature] = {}
        self._centered: dict[Feature, Tensor] = {}

    def jacobian(self, name: str) -> OutputJacobian:
        """∂F/∂ of this head's part of the weight `name`.

        W_Q: x_i ⊗ Cov_i(v, s k); W_K: Cov_i(v, s x) ⊗ q_i; W_V: (A x)_i ⊗ I; all three times this
        head's rows of W_O. W_O itself: (A v)_i ⊗ I.
        """
        role = ROLE[name]
        if role in "QK":
            side = self.score_side(name)
            return OutputJacobian(side.vectors, side.on, self.covariance(self.values, side.feature), self.W_O)
        if role == "V":
            return OutputJacobian((self.A @ self.layer.feature(name)).flatten(0, 1), "a", None, self.W_O)
        vectors = torch.ones_like(self.out[..., :1]) if name == "b_O" else self.out
        return OutputJacobian(vectors.flatten(0, 1), "a", None, None)

    def functional(self, one: str, two: str) -> list[FactoredTerm]:
        """Return the terms of Σ_iv G_iv ∂²F_iv for two weights of this head, in the order Q, K, V, O."""
        roles = ROLE[one] + ROLE[two]
        if "b_O" in (one, two) or roles in ("VV", "OO"):
            return []
        if roles == "VO":
            return [self._value_output(one)]
        side = self.score_side(one)
        if roles[1] in "QK":
            terms = [] if self.layer.kind == "linear" else [self._third(side, self.score_side(two))]
            return terms + ([self._mixed(one, two)] if roles == "QK" else [])
        if roles[1] == "V":
            right, feature = self.G, self._input(two)
        else:
            right, feature = self.layer.G, self.values
        core = self.covariance(side.feature, feature)
        return [FactoredTerm(side.vectors, right.flatten(0, 1), core, side.on, "e")]

    def score_side(self, name: str) -> ScoreSide:
        """Return the derivative of the scores in a weight: query vectors and a feature of the keys."""
        if name not in self._sides:
            self._sides[name] = self._query_side(name) if ROLE[name] == "Q" else self._key_side(name)
        return self._sides[name]

    def _query_side(self, name: str) -> ScoreSide:
        """x_i ⊗ s R_iᵀ k̂_j: the key rotated back to the frame of the query."""
        x, rope, k = self.layer.feature(name), self.layer.rope, self.layer.scale * self.k
        if rope is None:
            return ScoreSide(x.flatten(0, 1), "a", self.token(k))

        def rotated_keys(queries: slice) -> Tensor:
            cos, sin = (table[queries, None] for table in rope[:2])
            return rotate(k[:, None].expand(-1, len(cos), -1, -1), cos, -sin)

        return ScoreSide(x.flatten(0, 1), "a", Feature(k.shape[-1:], rotated_keys))

    def _key_side(self, name: str) -> ScoreSide:
        """s x_j ⊗ R_jᵀ q̂_i: a rotation couples query and key, so that no vector factors out."""
        layer, q, x = self.layer, self.q, self.layer.scale * self.layer.feature(name)
        if layer.rope is None:
            return ScoreSide(q.flatten(0, 1), "c", self.token(x))

        def rotated_queries(queries: slice) -> Tensor:
            back = layer.rotate_keys(q[:, queries, None].expand(-1, -1, x.shape[1], -1), back=True)
            return (x[:, None, :, :, None] * back[..., None, :]).flatten(3)

        return ScoreSide(None, "", Feature((x.shape[-1], q.shape[-1]), rotated_queries))

    def _input(self, name: str) -> Feature:
        """Feature at the keys that the weight `name` multiplies."""
        if name not in self._inputs:
            self._inputs[name] = self.token(self.layer.feature(name))
        return self._inputs[name]

    def token(self, f: Tensor) -> Feature:
        """Return a feature (n, S, p) that is the same for every query."""
        num = self.A.shape[1]
        return Feature(f.shape[-1:], lambda queries: f[:, None].expand(-1, len(range(num)[queries]), -1, -1))

    @cached_property
    def values(self) -> Feature:
        """The values v_j."""
        return self.token(self.v)

    def covariance(self, f: Feature, g: Feature) -> Tensor:
        """Cov_i(f, g) for every query: (n L, *f.shape, *g.shape); not centered if attention is linear."""
        return self._moment(self.slope, f, g)

    def third(self, f: Feature, g: Feature) -> Tensor:
        """C3_i(f, g) for every query: (n L, *f.shape, *g.shape)."""
        return self._moment(self.tau, f, g)

    def _moment(self, weights: Tensor, f: Feature, g: Feature) -> Tensor:
        parts = []
        for queries in self._queries(f, g):
            left = self.centered(f, queries) * weights[:, queries, :, None]
            parts.append(left.mT @ self.centered(g, queries))
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return whole.flatten(0, 1).reshape(-1, *f.shape, *g.shape)

    def centered(self, f: Feature, queries: slice) -> Tensor:
        """Return f̃_ij, (n, l, S, size): subtract the most attended key first, then the mean."""
        if f in self._centered:
            return self._centered[f][:, queries]
        values = f.at(queries)
        if self.layer.kind == "linear":
            return values
        top = self.top[:, queries, None, None].expand(-1, -1, 1, values.shape[-1])
        values = values - values.gather(2, top)
        values = values - (self.A[:, queries, None] @ values)
        if values.shape[1] == self.A.shape[1] and values.numel() <= MAX_CACHED:
            self._centered[f] = values
        return values

    def _queries(self, f: Feature, g: Feature) -> Iterator[slice]:
        n, L, S = self.A.shape
        step = max(1, MAX_ENTRIES // (n * S * (prod(f.shape) + prod(g.shape))))
        return (slice(start, start + step) for start in range(0, L, step))

    def _third(self, one: ScoreSide, two: ScoreSide) -> FactoredTerm:
        """Σ_i vectors ⊗ vectors ⊗ C3_i; with two rotated keys, one term for each pair (i, j)."""
        on = two.on.translate(str.maketrans(ROW, COLUMN))
        if one.on or two.on:
            return FactoredTerm(one.vectors, two.vectors, self.third(one.feature, two.feature), one.on, on)
        whole = slice(0, self.A.shape[1])
        left, right = (
            self.centered(one.feature, whole),
            self.centered(two.feature, whole) * self.tau[..., None],
        )
        left, right = left.flatten(0, 2), right.flatten(0, 2)
        shapes = one.feature.shape, two.feature.shape
        return FactoredTerm(left.unflatten(1, shapes[0]), right.unflatten(1, shapes[1]), None, ROW, COLUMN)

    def _mixed(self, query: str, key: str) -> FactoredTerm:
        """Σ_ij τ_ij ∂²t_ij/∂W_Q∂W_K = s Σ_ij τ_ij x_ia x_jb (R_iᵀ R_j)_ce; R = I without rotary positions."""
        layer, eye = self.layer, self.eye(self.k)
        x, y = layer.feature(query), layer.feature(key)
        if layer.rope is None:
            if layer.kind == "softmax":
                y = y - y.mean(1, keepdim=True)  # rows of τ sum to zero, so no mean enters
            M = layer.scale * torch.einsum("nia,nib->ab", x, self.tau @ y)
            return FactoredTerm(eye, eye, M, "c", "e", shared=True)
        cos, sin, cos_k, sin_k = layer.rope
        with_cos = torch.einsum("nij,njb,jf->nibf", self.tau, y, cos_k)
        with_sin = torch.einsum("nij,njb,jf->nibf", self.tau, y, sin_k)
        even = cos[:, None] * with_cos + sin[:, None] * with_sin
        odd = cos[:, None] * with_sin - sin[:, None] * with_cos
        even, odd = (layer.scale * torch.einsum("nia,nibf->fab", x, part) for part in (even, odd))
        partner = eye.roll(len(eye) // 2, dims=1)
        return FactoredTerm(
            torch.cat([eye, eye]), torch.cat([eye, partner]), torch.cat([even, even, -odd, odd]), "c", "e"
        )

    def _value_output(self, value: str) -> FactoredTerm:
        """∂²F_io/∂W_V∂W_O = (A x)_ia δ_{v v'}, summed against G: (A x)ᵀ G on equal head features."""
        M = torch.einsum("nia,nio->ao", self.A @ self.layer.feature(value), self.layer.G)
        eye = self.eye(self.v)
        return FactoredTerm(eye, eye, M, "c", "b", shared=True)

    @staticmethod
    def eye(like: Tensor) -> Tensor:
        """The identity of the size of the last axis."""
        return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def outer_term(layer: AttentionLayer, one: OutputJacobian, two: OutputJacobian) -> FactoredTerm:
    """Σ_i J_iᵀ B_i J'_i, or Σ_ij J_iᵀ B_ij J'_j when the loss couples tokens.

    B is first projected to the heads, W_O B W'_Oᵀ, a matrix of the size of a head.
    """
    on = two.on.translate(str.maketrans(ROW, COLUMN))
    if isinstance(layer.B, Tensor) and layer.B.dim() == 5:
        return _coupled(layer.B, one, two, on)
    if two.core is None and one.core is not None:
        return outer_term(layer, two, one).T  # B is symmetric
    B = _between(layer.B, one.space, two.space)
    if two.core is None:
        B = B if isinstance(B, Tensor) else B * AttentionHead.eye(layer.G)
        return FactoredTerm(one.vectors, two.vectors, B, one.on, on, shared=B.dim() == 2)
    if isinstance(B, Tensor):
        right = (B @ two.core.flatten(2)).unflatten(2, two.core.shape[2:])
    else:
        right = B * two.core
    if one.core is None:
        return FactoredTerm(one.vectors, two.vectors, right, one.on, on)
    if not one.on and not two.on:
        return FactoredTerm(one.core.flatten(0, 1), right.flatten(0, 1), None, ROW, COLUMN)
    return FactoredTerm(one.vectors, two.vectors, one.core, one.on, on, half=right)


def _between(B: float | Tensor, left: Tensor | None, right: Tensor | None) -> float | Tensor:
    """Return W_O B W'_Oᵀ for each token; a number B means a multiple of the identity."""
    if isinstance(B, Tensor):
        B = B.flatten(0, 1)
        B = B if left is None else left @ B
        return B if right is None else B @ right.mT
    if left is None:
        return B if right is None else B * right.mT
    return B * (left if right is None else left @ right.mT)


def _coupled(B: Tensor, one: OutputJacobian, two: OutputJacobian, on: str) -> FactoredTerm:
    """Return the term of a loss that couples tokens, B (n, L, o, L, o); its summands are pairs of queries."""
    n, L = B.shape[:2]
    B = B if one.space is None else torch.einsum("vo,niojw->nivjw", one.space, B)
    B = B if two.space is None else torch.einsum("nivjo,wo->nivjw", B, two.space)
    rows, columns = (() if side.core is None else side.core.shape[2:] for side in (one, two))
    K = None if two.core is None else two.core.flatten(2).unflatten(0, (n, L))
    if one.core is not None and K is not None and not one.on and not two.on:
        right = torch.einsum("nivjw,njws->nivs", B, K).flatten(0, 2)
        return FactoredTerm(one.core.flatten(0, 1), right.unflatten(1, columns), None, ROW, COLUMN)
    core = B if K is None else torch.einsum("nivjw,njws->nivjs", B, K)
    if one.core is not None:
        core = torch.einsum("nivr,nivjs->nirjs", one.core.flatten(2).unflatten(0, (n, L)), core)
    core = core.transpose(2, 3).flatten(0, 2)
    core = core.reshape(-1, *(rows or core.shape[1:2]), *(columns or core.shape[2:]))
    left = None if one.vectors is None else one.vectors.repeat_interleave(L, dim=0)
    right = None
    if two.vectors is not None:
        right = two.vectors.unflatten(0, (n, 1, L)).expand(-1, L, -1, -1).flatten(0, 2)
    return FactoredTerm(left, right, core, one.on, on)
