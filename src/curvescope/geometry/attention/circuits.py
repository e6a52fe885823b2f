"""One attention head as two low-rank matrices: query-key (QK) and value-output (VO).

With the norm before attention folded into the weights, Ŵ = P Γ W and b̂ = b + β W (see `sphere`), and the
normalized stream n, the score of query i and key j is

    s_ij = scale (n_i Ŵ_Q Ŵ_Kᵀ n_jᵀ + b̂_Q Ŵ_Kᵀ n_jᵀ) + terms that do not depend on j,

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
    """One attention head. Matrices act from the right, and include the norm if `folded`.

    `kind` is the norm of the stream (`none` if nothing is folded). `note` tells why a head is not `foldable`,
    or what the bilinear form omits (a norm on queries and keys, a cap on the scores).
    """

    W_Q: Tensor  # (d, h), folded: Ŵ_Q
    W_K: Tensor  # (d, h)
    W_V: Tensor  # (d, h)
    W_O: Tensor  # (h, d), as stored
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
    q_gain: Tensor | None = None  # (h,) gain of a norm on queries: q ↦ q_gain ∘ q/rms(q)
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
        """scale Ŵ_Q Ŵ_Kᵀ: left vectors belong to queries, right ones to keys. RoPE: at offset 0."""
        return Factored(*self._qk_factors(), self.noise)

    @cached_property
    def vo(self) -> Factored:
        """Ŵ_V W_O, for LayerNorm Ŵ_V W_O P: left vectors are read from sources, right ones are written.

        Every LayerNorm removes the mean of its input, so the folded matrix omits the mean of the output.
        `W_O` and `values` include it.
        """
        return Factored(*self._vo_factors(), self.noise)

    def _qk_factors(self, offset: float = 0.0) -> tuple[Tensor, Tensor]:
        W_Q = self.W_Q if self.q_gain is None else self.W_Q * self.q_gain
        return self.scale * self._rotated(W_Q, offset), self._gained_keys()

    def _vo_factors(self) -> tuple[Tensor, Tensor]:
        return self.W_V, project(self.W_O, kind=self.kind).T

    def _gained_keys(self) -> Tensor:
        return self.W_K if self.k_gain is None else self.W_K * self.k_gain

    def _constant_query(self) -> Tensor:
        """scale b̂_Q, rotated as at offset 0: (h,)."""
        b = self.b_Q if self.q_gain is None else self.b_Q * self.q_gain
        return self.scale * self._rotated(b, 0.0)

    def _rotated(self, q: Tensor, offset: float) -> Tensor:
        """Return q R(Δ) for queries (…, h)."""
        if self.rotary is None or (offset == 0 and self.rotary.factor == 1):
            return q
        return q @ self.rotary.matrix(offset, q.shape[-1])

    def qk_at(self, offset: float) -> Factored:
        """Return scale Ŵ_Q R(Δ) Ŵ_Kᵀ, the content part for a query Δ positions after its key (RoPE)."""
        return Factored(*self._qk_factors(offset), self.noise)

    @property
    def augmented_qk(self) -> Factored:
        """scale [Ŵ_Q; b̂_Q] Ŵ_Kᵀ ((d + 1) × d). [n_i, 1] times it is the score without the constant."""
        A, B = self._qk_factors()
        return Factored(torch.cat([A, self._constant_query()[None]]), B, self.noise)

    def key_direction(self, n: Tensor, *, offset: float = 0.0, bias: bool = True) -> Tensor:
        """Return scale (n Ŵ_Q + b̂_Q) R(Δ) Ŵ_Kᵀ (…, d): its product with n_j is the score minus a constant.

        With a norm on queries and keys, the query is normalized and the key's length is ignored.
        """
        q = self.queries(n, offset=offset, bias=bias)
        return self.scale * q @ self._gained_keys().T

    def queries(self, n: Tensor, *, offset: float = 0.0, bias: bool = True) -> Tensor:
        """Return (n Ŵ_Q + b̂_Q) R(Δ) (…, h), normalized if queries are; `bias=False` omits b̂_Q."""
        return self._rotated(self._queries(n, bias=bias), offset)

    def keys(self, n: Tensor) -> Tensor:
        """Return n Ŵ_K + b̂_K (…, h), normalized if keys are, without rotation."""
        return self._normed(n @ self.W_K + self.b_K, self.k_gain)

    @property
    def key_bias(self) -> Tensor:
        """k₀ = scale b̂_Q Ŵ_Kᵀ (d,), which every query adds to the score of a key. RoPE: at offset 0."""
        return self._constant_query() @ self._gained_keys().T

    @property
    def query_bias(self) -> Tensor:
        """scale Ŵ_Q b̂_K (d,), which adds the same to all scores of a query, so the softmax cancels it."""
        A, _ = self._qk_factors()
        return A @ (self.b_K if self.k_gain is None else self.b_K * self.k_gain)

    @property
    def value_bias(self) -> Tensor:
        """b̂_V W_O (d,), which the head always writes, because attention sums to 1."""
        return self.b_V @ self.W_O

    def bias_share(self, b: Tensor | None = None) -> float:
        """Share of the variance of the key's score that comes from a constant query b (h,), default b̂_Q.

        |scale b Ŵ_Kᵀ|² / (|scale b Ŵ_Kᵀ|² + E|n Ŵ_QK|²), n uniform on the sphere of radius √d of the norm.
        """
        free = self.d - 1 if self.kind == "layernorm" else self.d
        content = self.qk.frobenius**2 * self.d / max(free, 1)
        query = self._constant_query() if b is None else self.scale * self._rotated(b, 0.0)
        constant = float((query @ self._gained_keys().T).square().sum())
        return constant / (constant + content) if constant else 0.0

    def scores(self, n_i: Tensor, n_j: Tensor | None = None, *, positions: Tensor | None = None) -> Tensor:
        """Return all s_ij for rows n_i (…, T, d) and n_j (…, S, d) (default n_i): (…, T, S), without a mask.

        Args:
            positions: positions of the rows (T,) for RoPE, if n_j is not given; default 0, 1, ….
        """
        n_j = n_i if n_j is None else n_j
        q, k = self._queries(n_i), self.keys(n_j)
        if self.rotary is not None:
            positions_of_rows = [
                torch.arange(x.shape[-2]) if positions is None else positions for x in (q, k)
            ]
            q, k = (self.rotary.apply(x, p) for x, p in zip((q, k), positions_of_rows, strict=True))
        s = self.scale * q @ k.transpose(-1, -2)
        return s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)

    def values(self, n: Tensor) -> Tensor:
        """Return n Ŵ_V W_O + b̂_V W_O (…, d), the output if a source has all the attention."""
        return (n @ self.W_V + self.b_V) @ self.W_O

    def pattern(self, n: Tensor, *, seen: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return the softmax of the scores (…, T, T) plus `bias` over the positions that are `seen`."""
        s = self.scores(n) if bias is None else self.scores(n) + bias
        return (s if seen is None else s.masked_fill(~seen, -torch.inf)).softmax(-1)

    def output(self, n: Tensor, *, seen: Tensor | None = None) -> Tensor:
        """Return the head's output to the stream (…, T, d), without b_O, for normalized rows n (…, T, d)."""
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
        state = "folded" if self.folded else "not folded"
        return f"Circuit({name}d {self.d}, h {self.size}, {state})"


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
    """Return the circuits of one head from its matrices, which act from the right.

    If folded, every input matrix becomes P Γ W and its bias b + β W, and `.qk` and `.vo` act on normalized
    streams n(x). Otherwise they act on the output of the norm, and γ and β are not used.

    Args:
        W_Q: (d, h), like W_K and W_V; tensors or arrays, converted to float64.
        W_O: (h, d).
        gamma: γ of the norm before attention; None is 1 (LayerNorm still projects).
        beta: β of that norm; None is 0.
        b_Q: (h,), like b_K and b_V; None is 0.
        b_O: (d,); None is 0.
        scale: factor of the scores, by default 1/√h.
        norm: `none` if attention reads the stream itself.
    """
    matrices = [torch.as_tensor(W).detach() for W in (W_Q, W_K, W_V, W_O)]
    noise = max(_precision(W) for W in matrices)
    Q, K, V, O = (W.double().cpu() for W in matrices)  # noqa: E741
    _check_shapes(Q, K, V, O)
    g, s = _vector(gamma, "gamma", len(Q)), _vector(beta, "beta", len(Q))
    biases = {name: _vector(b, name, n) for name, b, n in _biases(b_Q, b_K, b_V, b_O, Q, V)}
    kind = norm if folded else "none"
    folds = {"gamma": g, "beta": s, "kind": kind}
    Q, q = fold(Q, biases["b_Q"], **folds)
    K, k = fold(K, biases["b_K"], **folds)
    V, v = fold(V, biases["b_V"], **folds)
    o = biases["b_O"] if biases["b_O"] is not None else O.new_zeros(O.shape[1])
    size = 1 / math.sqrt(Q.shape[1]) if scale is None else float(scale)
    return Circuit(Q, K, V, O, q, k, v, o, size, kind, kind != "none", noise=noise)


def _biases(
    b_Q: Any, b_K: Any, b_V: Any, b_O: Any, Q: Tensor, V: Tensor
) -> list[tuple[Literal["b_Q", "b_K", "b_V", "b_O"], Any, int]]:
    """Return the biases with their expected lengths."""
    return [
        ("b_Q", b_Q, Q.shape[1]),
        ("b_K", b_K, Q.shape[1]),
        ("b_V", b_V, V.shape[1]),
        ("b_O", b_O, len(V)),
    ]


def _vector(v: Any, name: str, length: int) -> Tensor | None:
    """Return a vector of known length in float64, or None."""
    if v is None:
        return None
    vector = torch.as_tensor(v).detach().double().cpu().flatten()
    if len(vector) != length:
        raise ShapeError(f"{name}: expected {length} entries, got {tuple(torch.as_tensor(v).shape)}")
    return vector


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
    """Return the machine precision of entries with less precision than float64, else 0."""
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
        """Rotate x (…, T, h) by the angles of positions (T,)."""
        angle = positions.to(self.frequencies)[:, None] * self.frequencies
        cos, sin, f = angle.cos() * self.factor, angle.sin() * self.factor, len(self.frequencies)
        rotated, rest = x[..., : 2 * f], x[..., 2 * f :]
        if self.pairs == "half":
            a, b = rotated[..., :f], rotated[..., f:]
            rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        else:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            rotated = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        return torch.cat([rotated, rest], dim=-1)

    def matrix(self, offset: float, size: int) -> Tensor:
        """Return R(Δ) (h, h): q_i · k_j after rotation is q R(Δ) kᵀ, where Δ = i − j and q, k are rows.

        R(Δ) rotates the query by Δ positions and leaves other coordinates unchanged; `factor` enters squared.
        """
        plain = Rotary(self.frequencies, self.pairs)
        eye = torch.eye(size, dtype=self.frequencies.dtype, device=self.frequencies.device)
        R = plain.apply(eye, torch.full((size,), float(offset)).to(eye))
        num_rotated = 2 * len(self.frequencies)
        R[:num_rotated, :num_rotated] *= self.factor**2
        return R


def rotary_of(model: Model, layer: int) -> Rotary | None:
    """Return the rotation that a layer applies to queries and keys; None if positions are not rotary."""
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
    """Return the rotation of a TransformerLens model, from its stored sines and cosines of position 1."""
    attention: Any = model.module.get_submodule(f"blocks.{layer}.attn")
    adjacent, size = bool(attention.cfg.rotary_adjacent_pairs), attention.cfg.rotary_dim
    if attention.rotary_cos.shape[0] < 2:
        return Rotary(torch.zeros(size // 2, dtype=torch.float64), "adjacent" if adjacent else "half")
    angle = torch.atan2(attention.rotary_sin[1].double(), attention.rotary_cos[1].double()).cpu()
    return Rotary(angle[0::2], "adjacent") if adjacent else Rotary(angle[: size // 2])


def _hugging_face(model: Model, layer: int) -> Rotary:
    """Return the rotation of a transformers module, from its buffer of frequencies (Gemma 3 has several)."""
    kinds = getattr(getattr(model.module, "config", None), "layer_types", None)
    kind_prefix = "" if not kinds else f"{kinds[layer]}_"
    for prefix in (kind_prefix, ""):
        for module in model.module.modules():
            frequencies = getattr(module, f"{prefix}inv_freq", None)
            if isinstance(frequencies, Tensor):
                factor = float(getattr(module, f"{prefix}attention_scaling", 1.0))
                return Rotary(frequencies.detach().double().cpu(), "half", factor)
    raise UsageError(
        f"expected the frequencies of rotary positions in {model.name!r}, found none",
        hint="give the matrices to curvescope.geometry.attention.circuits yourself",
    )
