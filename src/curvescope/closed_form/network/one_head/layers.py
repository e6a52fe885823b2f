"""A causal network of one head at a point: the quantities for its derivatives, layer by layer.

The network has causal attention, a ReLU layer or none, no biases, no norm, and a loss at some positions. The
code skips everything that cannot reach the loss: tokens after the last scored position, and in the last layer
all queries but the s scored ones. The scores are x_i W_QK x_jᵀ with W_QK = W_Q W_Kᵀ/√d, and values are
x_j W_VO, W_VO = W_V W_O, so that a tangent of the stream costs one product with a d × d matrix per attention
layer instead of four.

The last layer of a network is a layer with fixed inputs, so the norms of its blocks are exact.

After the last attention scored tokens do not interact: r ↦ z = r U, possibly with a ReLU layer and norms. The
first derivative of this map gives the gradient and the GGN at attention's output. With norms, ∂²z/∂r² is not
zero and is computed in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from curvescope.closed_form.attention.block_norms import HeadNorms
from curvescope.closed_form.attention.layer import make_layer
from curvescope.closed_form.norms import NormPoint, norm_curvature, norm_output, norm_point

Loss = Literal["ce", "mse"]
Kind = Literal["softmax", "linear"]
Weights = Mapping[str, Tensor]
"""Weights by the zoo's names: L0.W_Q, …, L0.W_2, U."""


@dataclass(frozen=True)
class Task:
    """Tokens (n, T) with V classes, and the loss of the outputs at s scored positions.

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
        """Factor of the loss of a position: 1/(s n), or 1 for a sum."""
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
class LayerPoint:
    """One layer at its input, with Q queries and T tokens; Q = T except in the last layer."""

    x: Tensor  # (n, T, d)
    x_Q: Tensor  # (n, Q, d), the queries among x
    A: Tensor  # (n, Q, T)
    keys: Tensor  # (n, T, d): ∂ score_ij/∂x_i = x_j W_QKᵀ
    queries: Tensor  # (n, Q, d): ∂ score_ij/∂x_j = x_i W_QK
    values: Tensor  # (n, T, d): x W_VO
    r: Tensor  # (n, Q, d): the stream after attention
    active: Tensor | None  # (n, Q, 4 d): 1 for active ReLU units
    weights: dict[str, Tensor]  # W_Q, W_K, W_V, W_O, W_QK, W_VO and W_1, W_2
    skip: float
    kind: Kind
    mask: Tensor  # (Q, T)

    def feed(self, r: Tensor) -> Tensor:
        """Return the layer's output at r (n, …, Q, d) for fixed ReLU units, so that it also maps tangents."""
        if self.active is None:
            return r
        hidden = r @ self.weights["W_1"]
        hidden *= _aligned(self.active, hidden)
        return _add_product(r, hidden, self.weights["W_2"])

    def feed_back(self, g: Tensor) -> Tensor:
        """Apply the transpose of `feed`."""
        if self.active is None:
            return g
        hidden = g @ self.weights["W_2"].T
        hidden *= _aligned(self.active, hidden)
        return _add_product(g, hidden, self.weights["W_1"].T)

    def attend(self, t: Tensor) -> Tensor:
        """Return ∂A/∂scores applied to t (n, …, Q, T); the map is symmetric."""
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
) -> LayerPoint:
    """Return layer `index` at its input x (n, T, d), for some queries or all.

    Without `feed` the layer ends after its attention.
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
    return LayerPoint(x, x_Q, A, keys, q, values, r, active, W, skip, kind, mask)


def forward(
    x: Tensor, weights: Weights, depth: int, *, kind: Kind, skip: float, scored: slice
) -> list[LayerPoint]:
    """Return all layers for the stream x (n, T, d) before the first layer, T = `scored.stop`."""
    layers: list[LayerPoint] = []
    for index in range(depth):
        queries = scored if index == depth - 1 else None
        layers.append(layer_at(x, weights, index, kind=kind, skip=skip, queries=queries))
        x = layers[-1].feed(layers[-1].r)
    return layers


def _aligned(t: Tensor, like: Tensor) -> Tensor:
    """Return t (n, a, b) in a shape that broadcasts with (n, …, a, b)."""
    return t if t.dim() == like.dim() else t[:, None]


def _add_product(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return base + left @ right, in one pass."""
    flat = torch.addmm(base.reshape(-1, base.shape[-1]), left.reshape(-1, left.shape[-1]), right)
    return flat.reshape(base.shape)


EPS = 1e-5  # ε of the norms
TOKENS = 32  # tokens whose ReLU layers are multiplied out at once


@dataclass(frozen=True)
class Tail:
    """Derivatives after attention, per scored token: gradient, factor of the GGN, and the functional part."""

    G: Tensor  # (n, s, d)
    outer: Tensor  # (n, s, d, V)
    functional: Tensor | None  # (n, s, d, d)


def last_blocks(layer: LayerPoint, U: Tensor, task: Task) -> HeadNorms:
    """Return the blocks of the last layer of a network without norms."""
    z, straight = layer.feed(layer.r) @ U, slope_of_outputs(layer, U)
    G = (straight @ task.gradient(z)[..., None])[..., 0]
    return _blocks(layer, Tail(G, straight @ task.root(z), None))


def pre_norm_blocks(x: Tensor, weights: Weights, task: Task) -> HeadNorms:
    """Return the blocks of a one-layer pre-norm network at the stream x (n, T, d); gains 1 and shifts 0."""
    normed = norm_output(norm_point(x, eps=EPS))
    layer = layer_at(normed, weights, 0, kind="softmax", skip=0.0, queries=task.scored, feed=False)
    return _blocks(layer, normed_tail(x[:, task.scored] + layer.r, weights, task))


def slope_of_outputs(layer: LayerPoint, U: Tensor) -> Tensor:
    """∂z/∂r = U + W_1 D W_2 U for each scored token: (n, s, d, V)."""
    if layer.active is None:
        return U.expand(*layer.r.shape[:2], *U.shape)
    return U + layer.weights["W_1"] @ (layer.active[..., None] * (layer.weights["W_2"] @ U))


def normed_tail(r: Tensor, weights: Weights, task: Task) -> Tail:
    """Return the derivatives of r ↦ u = r + ReLU(N(r) W_1) W_2 ↦ z = N(u) U.

    With J₂, J_f the norms' Jacobians and C = W_1 D W_2, ∂u/∂r = I + J₂ C as a map of rows, and
    ∂²⟨g, z⟩/∂r² = (I + J₂ C) K_f (I + J₂ C)ᵀ + K₂ with the norms' curvatures K at their cotangents.
    """
    W_1, W_2, U = weights["L0.W_1"], weights["L0.W_2"], weights["U"]
    second = norm_point(r, eps=EPS)
    hidden = second.x_hat @ W_1
    active = (hidden > 0).to(r.dtype)
    final = norm_point(r + (hidden * active) @ W_2, eps=EPS)
    z = final.x_hat @ U
    g_z = task.gradient(z)
    C = _relu_layer(W_1, active, W_2)
    du = torch.eye(r.shape[-1]).to(r) + _jacobian_times(second, C)
    straight = du @ _jacobian_times(final, U)
    g_f = g_z @ U.T
    g_2 = (C @ final.apply(g_f)[..., None])[..., 0]
    functional = _curvature_between(du, final, g_f) + norm_curvature(second, g_2)
    return Tail((straight @ g_z[..., None])[..., 0], straight @ task.root(z), functional)


def _relu_layer(W_1: Tensor, active: Tensor, W_2: Tensor) -> Tensor:
    """Return W_1 D W_2 for each token: (n, s, d, d)."""
    tokens = active.flatten(0, 1).split(TOKENS)
    return torch.cat([(W_1 * part[:, None]) @ W_2 for part in tokens]).unflatten(0, active.shape[:2])


def _jacobian_times(at: NormPoint, M: Tensor) -> Tensor:
    """Return J M = (P M − x̂ (x̂ᵀM)/d)/σ: (…, d, c)."""
    along = at.x_hat[..., None, :] @ M / at.d
    return (M - M.mean(-2, keepdim=True) - at.x_hat[..., None] * along) / at.sigma[..., None]


def _curvature_between(du: Tensor, at: NormPoint, g: Tensor) -> Tensor:
    """Return du K duᵀ for the norm's curvature K = −(w x̂ᵀ + x̂ wᵀ + κ J)/(dσ), w = J g, κ = x̂ · g."""
    kappa = (at.x_hat * g).sum(-1, keepdim=True)[..., None]
    spread = du - du.mean(-1, keepdim=True)  # du P
    a = (du @ at.x_hat[..., None]) / at.d
    b = du @ at.apply(g)[..., None] - kappa / (2 * at.sigma[..., None]) * a
    mixed = b @ a.mT
    return (
        -(mixed + mixed.mT + kappa / (at.d * at.sigma[..., None]) * (spread @ spread.mT))
        / at.sigma[..., None]
    )


def _blocks(layer: LayerPoint, tail: Tail) -> HeadNorms:
    named = {role.removeprefix("W_"): layer.weights[role] for role in ("W_Q", "W_K", "W_V", "W_O")}
    head = make_layer(layer.x_Q, named, tail.G, 0.0, X_K=layer.x, mask=layer.mask, kind=layer.kind)
    return HeadNorms(head, tail.outer, tail.functional)
