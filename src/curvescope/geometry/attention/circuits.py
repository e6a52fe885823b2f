"""One attention head as two low-rank matrices: what its queries look for in keys, what its values write.

With the norm before attention folded in, Ŵ = P Γ W and b̂ = b + β W (see `sphere`), and n the normalized
stream, the score of query i and key j is

    s_ij = scale (n_i Ŵ_Q Ŵ_Kᵀ n_jᵀ + b̂_Q Ŵ_Kᵀ n_jᵀ) + what does not depend on j,

and source j contributes a_ij (n_j Ŵ_V + b̂_V) W_O to destination i, where a = softmax(s).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.geometry.low_rank import Factored
from curvescope.geometry.sphere import NormKind, fold, project
from curvescope.models.model import Model
from curvescope.models.zoo.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Circuit:
    """One head. Matrices act from the right and have the norm in them where `folded`.

    `kind` is the norm of the stream (`none` if nothing is folded). `note` says why a head is not `foldable`,
    or what else the bilinear form leaves out (a norm on queries and keys, a cap on the scores).
    """

    W_Q: Tensor  # (d, h), folded: Ŵ_Q
    W_K: Tensor  # (d, h)
    W_V: Tensor  # (d, h)
    W_O: Tensor  # (h, d), as it is
    b_Q: Tensor  # (h,), folded: b̂_Q
    b_K: Tensor  # (h,)
    b_V: Tensor  # (h,)
    b_O: Tensor  # (d,), of the whole layer
    scale: float
    kind: NormKind = "none"
    folded: bool = False
    foldable: bool = True
    noise: float = 0.0  # relative precision of the weights
    layer: int | None = None
    head: int | None = None
    kv_head: int | None = None
    rotary: Rotary | None = None
    q_gain: Tensor | None = None  # (h,) of a norm on queries; then q ↦ q_gain ∘ q/rms(q)
    k_gain: Tensor | None = None
    qk_eps: float = 0.0
    softcap: float | None = None  # scores are softcap · tanh(s / softcap)
    note: str = ""

    @property
    def d(self) -> int:
        """Width of the stream."""
        return self.W_Q.shape[0]

    @property
    def size(self) -> int:
        """Width h of the head."""
        return self.W_V.shape[1]

    @cached_property
    def qk(self) -> Factored:
        """scale Ŵ_Q Ŵ_Kᵀ: left vectors are read from queries, right ones from keys. RoPE: at offset 0."""
        return Factored(*self._qk_factors(), self.noise)

    @cached_property
    def vo(self) -> Factored:
        """Ŵ_V W_O, for LayerNorm Ŵ_V W_O P: left vectors are read from sources, right ones are written.

        Every reader of a LayerNorm stream removes the mean of what is written, so the folded matrix leaves it
        out; `W_O` itself, and `values`, keep it.
        """
        return Factored(*self._vo_factors(), self.noise)

    def _qk_factors(self, offset: float = 0.0) -> tuple[Tensor, Tensor]:
        W_Q = self.W_Q if self.q_gain is None else self.W_Q * self.q_gain
        return self.scale * self._turned(W_Q, offset), self._gained_keys()

    def _vo_factors(self) -> tuple[Tensor, Tensor]:
        return self.W_V, project(self.W_O, kind=self.kind).T

    def _gained_keys(self) -> Tensor:
        return self.W_K if self.k_gain is None else self.W_K * self.k_gain

    def _constant_query(self) -> Tensor:
        """scale b̂_Q, turned as at offset 0: (h,)."""
        b = self.b_Q if self.q_gain is None else self.b_Q * self.q_gain
        return self.scale * self._turned(b, 0.0)

    def _turned(self, q: Tensor, offset: float) -> Tensor:
        """q R(Δ) for queries (…, h)."""
        if self.rotary is None or (offset == 0 and self.rotary.factor == 1):
            return q
        return q @ self.rotary.matrix(offset, q.shape[-1])

    def qk_at(self, offset: float) -> Factored:
        """scale Ŵ_Q R(Δ) Ŵ_Kᵀ: the content part for a query Δ positions behind its key (RoPE)."""
        return Factored(*self._qk_factors(offset), self.noise)

    @property
    def augmented_qk(self) -> Factored:
        """scale [Ŵ_Q; b̂_Q] Ŵ_Kᵀ ((d + 1) × d): [n_i, 1] times it is all of the score that depends on j."""
        A, B = self._qk_factors()
        return Factored(torch.cat([A, self._constant_query()[None]]), B, self.noise)

    def key_direction(self, n: Tensor, *, offset: float = 0.0, bias: bool = True) -> Tensor:
        """scale (n Ŵ_Q + b̂_Q) R(Δ) Ŵ_Kᵀ (…, d): its product with n_j is the score, less a constant.

        With a norm on queries and keys, the query is normed and the key's length is left out.
        """
        q = self.queries(n, offset=offset, bias=bias)
        return self.scale * q @ self._gained_keys().T

    def queries(self, n: Tensor, *, offset: float = 0.0, bias: bool = True) -> Tensor:
        """(n Ŵ_Q + b̂_Q) R(Δ) (…, h), normed where queries are; `bias` False leaves all of b̂_Q out."""
        return self._turned(self._queries(n, bias=bias), offset)

    def keys(self, n: Tensor) -> Tensor:
        """n Ŵ_K + b̂_K (…, h), normed where keys are; not rotated."""
        return self._normed(n @ self.W_K + self.b_K, self.k_gain)

    @property
    def key_bias(self) -> Tensor:
        """k₀ = scale b̂_Q Ŵ_Kᵀ (d,): what every query adds to the score of a key. RoPE: at offset 0."""
        return self._constant_query() @ self._gained_keys().T

    @property
    def query_bias(self) -> Tensor:
        """scale Ŵ_Q b̂_K (d,): adds the same to all scores of a query, so softmax cancels it."""
        A, _ = self._qk_factors()
        return A @ (self.b_K if self.k_gain is None else self.b_K * self.k_gain)

    @property
    def value_bias(self) -> Tensor:
        """b̂_V W_O (d,): what the head writes whatever it attends to, because attention sums to 1."""
        return self.b_V @ self.W_O

    def bias_share(self, b: Tensor | None = None) -> float:
        """Share of the variance of the key's score that comes from a constant query b (h,), default b̂_Q.

        |scale b Ŵ_Kᵀ|² / (|scale b Ŵ_Kᵀ|² + E|n Ŵ_QK|²), n uniform on the sphere of radius √d of the norm.
        """
        free = self.d - 1 if self.kind == "layernorm" else self.d
        content = self.qk.frobenius**2 * self.d / max(free, 1)
        query = self._constant_query() if b is None else self.scale * self._turned(b, 0.0)
        constant = float((query @ self._gained_keys().T).square().sum())
        return constant / (constant + content) if constant else 0.0

    def scores(self, n_i: Tensor, n_j: Tensor | None = None, *, positions: Tensor | None = None) -> Tensor:
        """All of s_ij for rows n_i (…, T, d) and n_j (…, S, d) (default n_i): (…, T, S), not masked.

        Args:
            positions: of the rows (T,), for RoPE, when n_j is not given; default 0, 1, ….
        """
        n_j = n_i if n_j is None else n_j
        q, k = self._queries(n_i), self.keys(n_j)
        if self.rotary is not None:
            own = [torch.arange(x.shape[-2]) if positions is None else positions for x in (q, k)]
            q, k = (self.rotary.apply(x, p) for x, p in zip((q, k), own, strict=True))
        s = self.scale * q @ k.transpose(-1, -2)
        return s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)

    def values(self, n: Tensor) -> Tensor:
        """n Ŵ_V W_O + b̂_V W_O (…, d): what a source writes when it has all the attention."""
        return (n @ self.W_V + self.b_V) @ self.W_O

    def pattern(self, n: Tensor, *, seen: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """softmax of the scores (…, T, T) where `seen`; `bias` is added to them."""
        s = self.scores(n) if bias is None else self.scores(n) + bias
        return (s if seen is None else s.masked_fill(~seen, -torch.inf)).softmax(-1)

    def output(self, n: Tensor, *, seen: Tensor | None = None) -> Tensor:
        """Output of the head to the stream (…, T, d), without b_O, for normalized rows n (…, T, d)."""
        return self.pattern(n, seen=seen) @ self.values(n)

    def _queries(self, n: Tensor, *, bias: bool = True) -> Tensor:
        q = n @ self.W_Q
        return self._normed(q + self.b_Q if bias else q, self.q_gain)

    def _normed(self, x: Tensor, gain: Tensor | None) -> Tensor:
        if gain is None:
            return x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.qk_eps) * gain

    def __repr__(self) -> str:
        name = "" if self.layer is None else f"L{self.layer}.h{self.head}: "
        how = "folded" if self.folded else "not folded"
        return f"Circuit({name}d {self.d}, h {self.size}, {how})"


def circuits(
    W_Q: Any,
    W_K: Any,
    W_V: Any,
    W_O: Any,
    *,
    gamma: Any = None,
    beta: Any = None,
    b_Q: Any = None,
    b_K: Any = None,
    b_V: Any = None,
    b_O: Any = None,
    scale: float | None = None,
    norm: NormKind = "layernorm",
    folded: bool = True,
) -> Circuit:
    """The circuits of one head from its matrices, which act from the right.

    Folded, every input matrix becomes P Γ W and its bias b + β W; `.qk` and `.vo` then act on normalized
    streams n(x). Not folded, they act on what the norm returns, and γ and β are not used.

    Args:
        W_Q: (d, h), as are W_K and W_V; tensors or arrays, worked on in float64.
        W_O: (h, d).
        gamma: of the norm before attention, with β; None is 1 and 0 (LayerNorm still projects).
        b_Q: (h,), as are b_K and b_V; None is 0.
        b_O: (d,); None is 0.
        scale: of the scores, by default 1/√h.
        norm: `none` where attention reads the stream itself.
    """
    matrices = [torch.as_tensor(W).detach() for W in (W_Q, W_K, W_V, W_O)]
    noise = max(_precision(W) for W in matrices)
    Q, K, V, O = (W.double().cpu() for W in matrices)  # noqa: E741
    _check_shapes(Q, K, V, O)
    g, s = _vector(gamma, "gamma", len(Q)), _vector(beta, "beta", len(Q))
    biases = {name: _vector(b, name, n) for name, b, n in _wanted(b_Q, b_K, b_V, b_O, Q, V)}
    kind = norm if folded else "none"
    folds = {"gamma": g, "beta": s, "kind": kind}
    Q, q = fold(Q, biases["b_Q"], **folds)
    K, k = fold(K, biases["b_K"], **folds)
    V, v = fold(V, biases["b_V"], **folds)
    o = biases["b_O"] if biases["b_O"] is not None else O.new_zeros(O.shape[1])
    size = 1 / math.sqrt(Q.shape[1]) if scale is None else float(scale)
    return Circuit(Q, K, V, O, q, k, v, o, size, kind, kind != "none", noise=noise)


def _wanted(
    b_Q: Any, b_K: Any, b_V: Any, b_O: Any, Q: Tensor, V: Tensor
) -> list[tuple[Literal["b_Q", "b_K", "b_V", "b_O"], Any, int]]:
    """Biases with their lengths."""
    return [
        ("b_Q", b_Q, Q.shape[1]),
        ("b_K", b_K, Q.shape[1]),
        ("b_V", b_V, V.shape[1]),
        ("b_O", b_O, len(V)),
    ]


def _vector(v: Any, name: str, length: int) -> Tensor | None:
    """A vector of known length in float64, or None."""
    if v is None:
        return None
    found = torch.as_tensor(v).detach().double().cpu().flatten()
    if len(found) != length:
        raise ShapeError(f"{name}: expected {length} entries, got {tuple(torch.as_tensor(v).shape)}")
    return found


def _check_shapes(Q: Tensor, K: Tensor, V: Tensor, O: Tensor) -> None:  # noqa: E741
    fits = all(W.dim() == 2 for W in (Q, K, V, O))
    fits = fits and Q.shape == K.shape and V.shape[0] == Q.shape[0] and O.shape == V.T.shape
    if not fits:
        got = ", ".join(str(tuple(W.shape)) for W in (Q, K, V, O))
        raise ShapeError(
            f"expected W_Q, W_K (d, h), W_V (d, v) and W_O (v, d), got {got}",
            hint="matrices act from the right: x @ W; the weight of an nn.Linear is the transpose",
        )


def _precision(W: Tensor) -> float:
    """Machine precision of entries that are kept in less than float64, else 0."""
    short = W.is_floating_point() and W.dtype != torch.float64
    return torch.finfo(W.dtype).eps if short else 0.0


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotation of the first 2 f coordinates of a query or key, f = len(frequencies), by position × frequency.

    Coordinate j is paired with j + f (`half`, Llama and NeoX) or 2j with 2j + 1 (`adjacent`, GPT-J). `factor`
    multiplies the rotated coordinates (scaled RoPE).
    """

    frequencies: Tensor  # (f,) radians per position
    pairs: Literal["half", "adjacent"] = "half"
    factor: float = 1.0

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (…, T, h) turned by the angles of positions (T,)."""
        angle = positions.to(self.frequencies)[:, None] * self.frequencies
        cos, sin, f = angle.cos() * self.factor, angle.sin() * self.factor, len(self.frequencies)
        turned, rest = x[..., : 2 * f], x[..., 2 * f :]
        if self.pairs == "half":
            a, b = turned[..., :f], turned[..., f:]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        else:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        return torch.cat([turned, rest], dim=-1)

    def matrix(self, offset: float, size: int) -> Tensor:
        """R(Δ) (h, h) with q_i · k_j after rotation = q R(Δ) kᵀ, where Δ = i − j and q, k are rows.

        R(Δ) turns the query by Δ positions; what is not rotated stays; `factor` enters squared.
        """
        plain = Rotary(self.frequencies, self.pairs)
        eye = torch.eye(size, dtype=self.frequencies.dtype, device=self.frequencies.device)
        R = plain.apply(eye, torch.full((size,), float(offset)).to(eye))
        turned = 2 * len(self.frequencies)
        R[:turned, :turned] *= self.factor**2
        return R


def rotary_of(model: Model, layer: int) -> Rotary | None:
    """The rotation that a layer applies to queries and keys; None where positions are otherwise."""
    if model.facts.get("positions") != "rope":
        return None
    k = model.facts["d_head"]
    if isinstance(model.module, Transformer):
        exponent = -torch.arange(0, k, 2, dtype=torch.float64) / k
        return Rotary(model.module.cfg.rope_base**exponent)
    if model.facts.get("kind") == "hooked_transformer":
        return _hooked(model, layer)
    return _hugging_face(model, layer)


def _hooked(model: Model, layer: int) -> Rotary:
    """TransformerLens keeps sines and cosines; those of position 1 are the frequencies."""
    attention: Any = model.module.get_submodule(f"blocks.{layer}.attn")
    adjacent, size = bool(attention.cfg.rotary_adjacent_pairs), attention.cfg.rotary_dim
    if attention.rotary_cos.shape[0] < 2:
        return Rotary(torch.zeros(size // 2, dtype=torch.float64), "adjacent" if adjacent else "half")
    angle = torch.atan2(attention.rotary_sin[1].double(), attention.rotary_cos[1].double()).cpu()
    return Rotary(angle[0::2], "adjacent") if adjacent else Rotary(angle[: size // 2])


def _hugging_face(model: Model, layer: int) -> Rotary:
    """The buffer of frequencies of a transformers module; Gemma 3 has one per kind of layer."""
    kinds = getattr(getattr(model.module, "config", None), "layer_types", None)
    front = "" if not kinds else f"{kinds[layer]}_"
    for prefix in (front, ""):
        for module in model.module.modules():
            found = getattr(module, f"{prefix}inv_freq", None)
            if isinstance(found, Tensor):
                factor = float(getattr(module, f"{prefix}attention_scaling", 1.0))
                return Rotary(found.detach().double().cpu(), "half", factor)
    raise UsageError(
        f"expected the frequencies of rotary positions in {model.name!r}, found none",
        hint="give the matrices to curvescope.geometry.attention.circuits yourself",
    )
