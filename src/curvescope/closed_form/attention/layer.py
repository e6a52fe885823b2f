"""One attention layer on a batch: checked inputs, attention weights, and the derivatives of its loss.

Every closed form for attention starts here. A layer has weights named Q, K, V and, if it has an output
projection, O; their biases are b_Q, b_K, b_V, b_O. Heads are column groups of W_Q, W_K, W_V and row groups
of W_O; keys and values may have fewer heads than queries, each then shared by consecutive query heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypedDict, TypeVar

import torch
from torch import Tensor

from curvescope.closed_form.softmax import masked_softmax
from curvescope.core.errors import ShapeError, UsageError

Kind = Literal["softmax", "linear"]
Rope = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]
T = TypeVar("T")
ROLE = {"Q": "Q", "b_Q": "Q", "QK": "Q", "K": "K", "b_K": "K", "V": "V", "b_V": "V", "O": "O", "b_O": "O"}


class AttentionOptions(TypedDict, total=False):
    """Options of a layer besides its weights."""

    X_K: Tensor | None  # inputs of the keys (S, d); X unless given (cross-attention)
    X_V: Tensor | None  # inputs of the values (S, d'); X_K unless given
    mask: Tensor | None  # boolean, true if a query (row) may attend to a key (column)
    bias: Tensor | None  # added to the scores; −inf hides a key
    scale: float | None  # factor of q kᵀ; 1/√d_K unless given
    rope: Rope | None  # cos, sin (L, d_K/2); then those of the keys, if they are other tokens
    kind: Kind  # "softmax" unless given


@dataclass(frozen=True)
class AttentionLayer:
    """Attention F = concat_h(A_h v_h) W_O + b_O on n samples, with G = ∂ℓ/∂F and B = ∂²ℓ/∂F².

    Scores are t = scale · q̂ k̂ᵀ + bias, q̂ and k̂ being rotated if `rope` is given; A is their softmax over
    the keys that a query may attend to, or t itself, masked, if `kind` is "linear". Without W_O there is
    one head and F is its output; without W_K the keys are the inputs themselves.
    """

    X: Tensor  # (n, L, d) query inputs
    X_K: Tensor  # (n, S, d) key inputs
    X_V: Tensor  # (n, S, d') value inputs
    weights: Mapping[str, Tensor]  # by name; a bias is one row
    G: Tensor  # (n, L, o)
    B: float | Tensor  # number, (n, L, o, o) or (n, L, o, L, o)
    num_heads: int
    num_kv_heads: int
    scale: float
    mask: Tensor | None  # broadcasts to (n, h, L, S), true if a query may attend to a key
    bias: Tensor | None  # broadcasts to (n, h, L, S)
    rope: tuple[Tensor, Tensor, Tensor, Tensor] | None  # cos, sin of queries (L, c/2), then of keys
    kind: Kind

    def feature(self, name: str) -> Tensor:
        """Return the input that the weight `name` multiplies; a column of ones for a bias."""
        source = {"Q": self.X, "K": self.X_K, "V": self.X_V}[ROLE[name]]
        return torch.ones_like(source[..., :1]) if name.startswith("b_") else source

    def project(self, role: str, weights: Mapping[str, Tensor]) -> Tensor | None:
        """Return Σ feature · weight over the weights of one role, by query head (n, h, T, c), or None."""
        names = [name for name in weights if ROLE[name] == role]
        if not names:
            return None
        total = torch.stack([self.feature(name) @ weights[name] for name in names]).sum(0)
        num = self.num_heads if role == "Q" else self.num_kv_heads
        heads = total.unflatten(-1, (num, -1)).transpose(1, 2)
        return heads.repeat_interleave(self.num_heads // num, dim=1)

    @cached_property
    def q(self) -> Tensor:
        """Rotated queries (n, h, L, c)."""
        queries = self.project("Q", self.weights)
        assert queries is not None
        return self.rotate_queries(queries)

    @cached_property
    def k(self) -> Tensor:
        """Rotated keys (n, h, S, c)."""
        keys = self.project("K", self.weights)
        return self.X_K[:, None] if keys is None else self.rotate_keys(keys)

    @cached_property
    def v(self) -> Tensor:
        """Values (n, h, S, d_V)."""
        values = self.project("V", self.weights)
        assert values is not None
        return values

    def rotate_queries(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Return R_i x_i over the queries i, or R_iᵀ x_i; x itself without rotary positions."""
        return x if self.rope is None else rotate(x, self.rope[0], -self.rope[1] if back else self.rope[1])

    def rotate_keys(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Return R_j x_j over the keys j, or R_jᵀ x_j."""
        return x if self.rope is None else rotate(x, self.rope[2], -self.rope[3] if back else self.rope[3])

    @cached_property
    def A(self) -> Tensor:
        """Attention weights (n, h, L, S); a query without visible keys has zero weights."""
        scores = self.scale * self.q @ self.k.mT
        if self.bias is not None:
            scores = scores + self.bias
        if self.kind == "linear":
            return scores if self.mask is None else scores * self.mask
        return masked_softmax(scores, self.mask)

    @cached_property
    def slope(self) -> Tensor:
        """Weights of the first derivative of A in the scores: A itself, or the mask if linear."""
        if self.kind == "softmax":
            return self.A
        ones = torch.ones_like(self.A)
        return ones if self.mask is None else ones * self.mask

    @cached_property
    def top(self) -> Tensor:
        """Index of the key that each query attends to most: (n, h, L)."""
        return self.A.argmax(-1)

    def center(self, t: Tensor) -> Tensor:
        """Each row of t (n, h, L, S) minus its mean under A; t itself if attention is linear.

        The most attended key is subtracted first, so that the result is accurate even if the other keys have
        little weight.
        """
        if self.kind == "linear":
            return t
        t = t - t.gather(-1, self.top[..., None])
        return t - (self.A * t).sum(-1, keepdim=True)

    @cached_property
    def heads_out(self) -> Tensor:
        """Output of each head, A v: (n, h, L, d_V)."""
        return self.A @ self.v

    @cached_property
    def G_heads(self) -> Tensor:
        """∂ℓ/∂ of each head's output: (n, h, L, d_V)."""
        return self.pull_output(self.G, self.weights.get("O"))

    def pull_output(self, U: Tensor, W_O: Tensor | None) -> Tensor:
        """Return U W_Oᵀ by head, (n, h, L, d_V), for U (n, L, o)."""
        if W_O is None:
            return U[:, None]
        return (U @ W_O.mT).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    @cached_property
    def tau(self) -> Tensor:
        """τ = ∂⟨G, F⟩/∂ scores, (n, h, L, S): A (ρ − ρ̄) with ρ = G vᵀ; rows sum to zero under softmax."""
        return self.slope * self.center(self.G_heads @ self.v.mT)

    def curve_loss(self, U: Tensor) -> Tensor:
        """Return B U for columns U (n, L, o, k)."""
        if not isinstance(self.B, Tensor):
            return self.B * U
        if self.B.dim() == 4:
            return self.B @ U
        return torch.einsum("niojw,njwk->niok", self.B, U)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions in the rotate-half layout: dimension f pairs with f + c/2.

    x is (…, T, c), cos and sin are (T, c/2) or broadcast to x's halves:
    (x_f, x_{f+c/2}) ↦ (x_f cos − x_{f+c/2} sin, x_{f+c/2} cos + x_f sin).
    """
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


def rope_table(
    num_positions: int, d_K: int, *, base: float = 10000.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (num_positions, d_K/2), of position · base^(−2f/d_K), f = 0 … d_K/2 − 1."""
    frequency = base ** (-2.0 * torch.arange(d_K // 2, dtype=torch.float64) / d_K)
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def make_layer(
    X: Tensor,
    weights: Mapping[str, Tensor | None],
    G: Tensor,
    B: float | Tensor,
    *,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    X_K: Tensor | None = None,
    X_V: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    rope: Rope | None = None,
    kind: Kind = "softmax",
) -> AttentionLayer:
    """Return the checked layer, with a sample axis everywhere, biases as rows, without absent weights."""
    if X.dim() not in (2, 3):
        raise ShapeError(f"expected X of shape (L, d) or (n, L, d), got {tuple(X.shape)}")
    if kind not in ("softmax", "linear"):
        raise UsageError(f"expected kind 'softmax' or 'linear', got {kind!r}")
    X_K = _given(X_K, X)
    X_V = _given(X_V, X_K)
    B = B if isinstance(B, Tensor) and B.dim() > 0 else float(B)
    if X.dim() == 2:
        X, X_K, X_V, G = X[None], X_K[None], X_V[None], G[None]
        B = B[None] if isinstance(B, Tensor) else B
    named = {n: W.reshape(1, -1) if n.startswith("b_") else W for n, W in weights.items() if W is not None}
    num_kv_heads = _given(num_kv_heads, num_heads)
    width = check_weights(X, X_K, X_V, named, num_heads, num_kv_heads)
    check_loss(X, named, G, B)
    full = (X.shape[0], num_heads, X.shape[1], X_K.shape[1])
    mask, bias = check_scores("mask", mask, full), check_scores("bias", bias, full)
    tables, scale = check_rope(rope, full, width), _given(scale, width**-0.5)
    return AttentionLayer(X, X_K, X_V, named, G, B, num_heads, num_kv_heads, scale, mask, bias, tables, kind)


def _given(value: T | None, otherwise: T) -> T:
    return otherwise if value is None else value


def check_weights(
    X: Tensor, X_K: Tensor, X_V: Tensor, weights: Mapping[str, Tensor], num_heads: int, num_kv_heads: int
) -> int:
    """Return the width of a query head; raise unless the weights fit the heads and the inputs (n, ·, ·)."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise UsageError(f"expected num_kv_heads to divide num_heads, got {num_kv_heads} and {num_heads}")
    if {X.dim(), X_K.dim(), X_V.dim()} != {3} or X_K.shape[:2] != X_V.shape[:2] or len(X) != len(X_K):
        raise ShapeError(
            f"expected keys and values on the same tokens, of the same samples as X {tuple(X.shape)}, "
            f"got X_K {tuple(X_K.shape)} and X_V {tuple(X_V.shape)}"
        )
    queries = "Q" if "Q" in weights else "QK"
    width = _check_matrix(queries, weights[queries], X.shape[-1], num_heads)
    width_K = X_K.shape[-1]
    if "K" in weights:
        width_K = _check_matrix("K", weights["K"], X_K.shape[-1], num_kv_heads)
    if width != width_K:
        raise ShapeError(f"expected queries and keys of one width per head, got {width} and {width_K}")
    width_V = _check_matrix("V", weights["V"], X_V.shape[-1], num_kv_heads)
    if "O" in weights:
        _check_matrix("O", weights["O"], num_heads * width_V, 1)
    for bias in ("b_Q", "b_K", "b_V", "b_O"):
        if bias in weights and weights[bias].shape[1] != weights[bias[2:]].shape[1]:
            raise ShapeError(
                f"expected {bias} of {weights[bias[2:]].shape[1]} entries, got {weights[bias].shape[1]}"
            )
    return width


def _check_matrix(name: str, W: Tensor, rows: int, heads: int) -> int:
    if W.dim() != 2 or W.shape[0] != rows or W.shape[1] % heads:
        raise ShapeError(
            f"expected W_{name} with {rows} rows and columns for {heads} equal heads, got {tuple(W.shape)}",
            hint="weights are inputs × outputs; a torch Linear stores the transpose",
        )
    return W.shape[1] // heads


def check_loss(X: Tensor, weights: Mapping[str, Tensor], G: Tensor, B: float | Tensor) -> None:
    """Raise unless G and B are derivatives in the output of the layer."""
    n, L, o = *X.shape[:2], (weights["O"] if "O" in weights else weights["V"]).shape[1]
    if G.shape != (n, L, o):
        raise ShapeError(f"expected G = ∂ℓ/∂F of shape ({n}, {L}, {o}) like F, got {tuple(G.shape)}")
    if isinstance(B, Tensor) and B.shape not in ((n, L, o, o), (n, L, o, L, o)):
        raise ShapeError(
            f"expected B = ∂²ℓ/∂F² as a number, ({n}, {L}, {o}, {o}) or ({n}, {L}, {o}, {L}, {o}), "
            f"got {tuple(B.shape)}",
            hint="G and B have a sample axis only if X has one",
        )


def check_rope(
    rope: tuple[Tensor, ...] | None, full: tuple[int, int, int, int], width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return cosines and sines of the queries, then of the keys; a single table serves both."""
    if rope is None:
        return None
    if len(rope) not in (2, 4):
        raise UsageError(
            f"expected rope as (cos, sin) or (cos, sin, cos_keys, sin_keys), got {len(rope)} tables"
        )
    cos, sin, cos_K, sin_K = (*rope, *rope)[:4]
    for table, tokens in ((cos, full[2]), (sin, full[2]), (cos_K, full[3]), (sin_K, full[3])):
        if width % 2 or table.shape != (tokens, width // 2):
            raise ShapeError(
                f"expected cos and sin of shape ({tokens}, {width}/2), got {tuple(table.shape)}",
                hint="give (cos, sin, cos_keys, sin_keys) when queries and keys are different tokens",
            )
    return cos, sin, cos_K, sin_K


def check_scores(what: str, table: Tensor | None, full: tuple[int, int, int, int]) -> Tensor | None:
    """Raise unless a mask or bias broadcasts to the scores' shape `full`."""
    if table is None:
        return None
    try:
        fits = torch.broadcast_shapes(table.shape, full) == full
    except RuntimeError:
        fits = False
    if not fits or (what == "mask") != (table.dtype == torch.bool):
        raise ShapeError(
            f"expected a {what} that broadcasts to (samples, heads, L, S) = {full}, "
            f"got {table.dtype} {tuple(table.shape)}",
            hint="a mask is boolean, true if a query may attend to a key; a bias is added to the scores",
        )
    return table
