"""A causal network of one head at a point: what its derivatives need, layer by layer, computed once.

Causal attention, ReLU or no feed-forward layer, no biases, no norm, and a loss of some positions only. Only
what can reach the loss is computed: no token behind the last scored position can, and in the last layer only
the s scored queries. The scores are x_i W_QK x_jᵀ with W_QK = W_Q W_Kᵀ/√d and values enter as x_j W_VO,
W_VO = W_V W_O, so that a tangent of the stream costs one product with a d × d matrix per attention layer and
not four.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Loss = Literal["ce", "mse"]
Kind = Literal["softmax", "linear"]
Weights = Mapping[str, Tensor]
"""By the zoo's names: L0.W_Q, …, L0.W_2, U."""


@dataclass(frozen=True)
class Task:
    """Tokens (n, T) of V kinds and the loss of the outputs at s scored positions.

    "ce" is the mean cross-entropy of the next token over the scored positions; "mse" the squared error of the
    one-hot of the current token, summed.
    """

    tokens: Tensor
    loss: Loss
    scored: slice
    num_classes: int

    @cached_property
    def onehot(self) -> Tensor:
        """Targets (n, s, V)."""
        shift = 1 if self.loss == "ce" else 0
        targets = self.tokens[:, self.scored.start + shift : self.scored.stop + shift]
        return torch.nn.functional.one_hot(targets, self.num_classes).double()

    @property
    def factor(self) -> float:
        """What multiplies the loss of a position: 1/(s n), or 1 for a sum."""
        return 1 / self.onehot[..., 0].numel() if self.loss == "ce" else 1.0

    def gradient(self, z: Tensor) -> Tensor:
        """∂L/∂z, (n, s, V)."""
        if self.loss == "mse":
            return 2 * (z - self.onehot)
        return self.factor * (z.softmax(-1) - self.onehot)

    def root(self, z: Tensor) -> Tensor:
        """R (n, s, V, V) with R Rᵀ = ∂²L/∂z²: √f (diag √p − p √pᵀ), or √2 I."""
        eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
        if self.loss == "mse":
            return (math.sqrt(2) * eye).expand(*z.shape, z.shape[-1])
        p = z.softmax(-1)
        return math.sqrt(self.factor) * (
            torch.diag_embed(p.sqrt()) - p[..., :, None] * p.sqrt()[..., None, :]
        )

    def curve(self, z: Tensor, u: Tensor) -> Tensor:
        """∂²L/∂z² u for tangents u (n, k, s, V) at z (n, s, V)."""
        if self.loss == "mse":
            return 2 * u
        p = z.softmax(-1)[:, None]
        return self.factor * p * (u - (p * u).sum(-1, keepdim=True))


@dataclass(frozen=True)
class Layer:
    """One layer at its input; Q queries see T tokens, Q = T but in the last layer."""

    x: Tensor  # (n, T, d)
    x_Q: Tensor  # (n, Q, d), the queries among x
    A: Tensor  # (n, Q, T)
    keys: Tensor  # (n, T, d): ∂ score_ij/∂x_i = x_j W_QKᵀ
    queries: Tensor  # (n, Q, d): ∂ score_ij/∂x_j = x_i W_QK
    values: Tensor  # (n, T, d): x W_VO
    r: Tensor  # (n, Q, d): the stream behind attention
    active: Tensor | None  # (n, Q, 4 d): where ReLU is on
    weights: dict[str, Tensor]  # W_Q, W_K, W_V, W_O, W_QK, W_VO and W_1, W_2
    skip: float
    kind: Kind
    mask: Tensor  # (Q, T)

    def feed(self, r: Tensor) -> Tensor:
        """Its output at r, ReLU as it is switched here, hence also the tangent of a tangent: (n, …, Q, d)."""
        if self.active is None:
            return r
        hidden = r @ self.weights["W_1"]
        hidden *= _aligned(self.active, hidden)
        return _add_product(r, hidden, self.weights["W_2"])

    def feed_back(self, g: Tensor) -> Tensor:
        """The transpose of `feed`."""
        if self.active is None:
            return g
        hidden = g @ self.weights["W_2"].T
        hidden *= _aligned(self.active, hidden)
        return _add_product(g, hidden, self.weights["W_1"].T)

    def attend(self, t: Tensor) -> Tensor:
        """∂A/∂scores applied to t (n, …, Q, T); symmetric, so its transpose too."""
        if self.kind == "linear":
            return t * self.mask
        A = _aligned(self.A, t)
        t = A * t
        return t - A * t.sum(-1, keepdim=True)


def layer_at(
    x: Tensor,
    weights: Weights,
    index: int,
    *,
    kind: Kind,
    skip: float,
    queries: slice | None = None,
    feed: bool = True,
) -> Layer:
    """Layer `index` at its input x (n, T, d), at some queries or all.

    Without `feed` nothing comes behind its attention.
    """
    W = {role: weights[f"L{index}.{role}"] for role in ("W_Q", "W_K", "W_V", "W_O")}
    W["W_QK"] = W["W_Q"] @ W["W_K"].T / math.sqrt(W["W_Q"].shape[1])
    W["W_VO"] = W["W_V"] @ W["W_O"]
    W |= {role: weights[f"L{index}.{role}"] for role in ("W_1", "W_2") if f"L{index}.{role}" in weights}
    chosen = slice(0, x.shape[1]) if queries is None else queries
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()[chosen]
    x_Q = x[:, chosen]
    q, keys, values = x_Q @ W["W_QK"], x @ W["W_QK"].T, x @ W["W_VO"]
    scores = q @ x.mT
    A = scores * mask if kind == "linear" else scores.masked_fill(~mask, -torch.inf).softmax(-1)
    r = skip * x_Q + A @ values
    active = (r @ W["W_1"] > 0).to(x.dtype) if "W_1" in W and feed else None
    return Layer(x, x_Q, A, keys, q, values, r, active, W, skip, kind, mask)


def forward(
    x: Tensor, weights: Weights, depth: int, *, kind: Kind, skip: float, scored: slice
) -> list[Layer]:
    """All layers at the stream x (n, T, d) that enters the first, T = `scored.stop`."""
    found: list[Layer] = []
    for index in range(depth):
        queries = scored if index == depth - 1 else None
        found.append(layer_at(x, weights, index, kind=kind, skip=skip, queries=queries))
        x = found[-1].feed(found[-1].r)
    return found


def _aligned(t: Tensor, like: Tensor) -> Tensor:
    """t (n, a, b) against (n, …, a, b)."""
    return t if t.dim() == like.dim() else t[:, None]


def _add_product(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """base + left @ right, in one pass."""
    flat = torch.addmm(base.reshape(-1, base.shape[-1]), left.reshape(-1, left.shape[-1]), right)
    return flat.reshape(base.shape)
