"""The last layer of a network is a layer with fixed inputs, so the norms of its blocks are exact.

Behind its attention every scored token goes its own way: r ↦ z = r U with a ReLU layer and norms on the way.
Its first derivative gives the gradient and the GGN at attention's output, and with norms there
is also ∂²z/∂r², in closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.closed_form.attention.block_norms import HeadNorms
from curvescope.closed_form.attention.layer import make_layer
from curvescope.closed_form.network.one_head.layers import Layer, Task, Weights, layer_at
from curvescope.closed_form.norms.derivatives import NormPoint, norm_curvature, norm_output, norm_point

EPS = 1e-5  # of the norms
TOKENS = 32  # whose ReLU layers are multiplied out at once


@dataclass(frozen=True)
class Tail:
    """What attention's output meets, per scored token: gradient, factor of H_o, and the rest."""

    G: Tensor  # (n, s, d)
    outer: Tensor  # (n, s, d, V)
    functional: Tensor | None  # (n, s, d, d)


def last_blocks(layer: Layer, U: Tensor, task: Task) -> HeadNorms:
    """The blocks of the last layer of a network without norms."""
    z, straight = layer.feed(layer.r) @ U, slope_of_outputs(layer, U)
    G = (straight @ task.gradient(z)[..., None])[..., 0]
    return _blocks(layer, Tail(G, straight @ task.root(z), None))


def pre_norm_blocks(x: Tensor, weights: Weights, task: Task) -> HeadNorms:
    """The blocks of a network of one layer, pre-norm, at the stream x (n, T, d); gains 1 and shifts 0."""
    normed = norm_output(norm_point(x, eps=EPS))
    layer = layer_at(normed, weights, 0, kind="softmax", skip=0.0, queries=task.scored, feed=False)
    return _blocks(layer, normed_tail(x[:, task.scored] + layer.r, weights, task))


def slope_of_outputs(layer: Layer, U: Tensor) -> Tensor:
    """∂z/∂r = U + W_1 D W_2 U for each scored token: (n, s, d, V)."""
    if layer.active is None:
        return U.expand(*layer.r.shape[:2], *U.shape)
    return U + layer.weights["W_1"] @ (layer.active[..., None] * (layer.weights["W_2"] @ U))


def normed_tail(r: Tensor, weights: Weights, task: Task) -> Tail:
    """The tail of r ↦ u = r + ReLU(N(r) W_1) W_2 ↦ z = N(u) U.

    With J₂, J_f the norms' Jacobians and C = W_1 D W_2, ∂u/∂r = I + J₂ C as a map of rows, and
    ∂²⟨g, z⟩/∂r² = (I + J₂ C) K_f (I + J₂ C)ᵀ + K₂, K being the norms' curvatures at what reaches them.
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
    """W_1 D W_2 for each token, a few at a time: (n, s, d, d)."""
    tokens = active.flatten(0, 1).split(TOKENS)
    return torch.cat([(W_1 * part[:, None]) @ W_2 for part in tokens]).unflatten(0, active.shape[:2])


def _jacobian_times(at: NormPoint, M: Tensor) -> Tensor:
    """J M = (P M − x̂ (x̂ᵀM)/d)/σ: (…, d, c)."""
    along = at.x_hat[..., None, :] @ M / at.d
    return (M - M.mean(-2, keepdim=True) - at.x_hat[..., None] * along) / at.sigma[..., None]


def _curvature_between(du: Tensor, at: NormPoint, g: Tensor) -> Tensor:
    """du K duᵀ for the norm's curvature K = −(w x̂ᵀ + x̂ wᵀ + κ J)/(dσ), w = J g, κ = x̂ · g."""
    kappa = (at.x_hat * g).sum(-1, keepdim=True)[..., None]
    spread = du - du.mean(-1, keepdim=True)  # du P
    a = (du @ at.x_hat[..., None]) / at.d
    b = du @ at.apply(g)[..., None] - kappa / (2 * at.sigma[..., None]) * a
    mixed = b @ a.mT
    return (
        -(mixed + mixed.mT + kappa / (at.d * at.sigma[..., None]) * (spread @ spread.mT))
        / at.sigma[..., None]
    )


def _blocks(layer: Layer, tail: Tail) -> HeadNorms:
    named = {role.removeprefix("W_"): layer.weights[role] for role in ("W_Q", "W_K", "W_V", "W_O")}
    head = make_layer(layer.x_Q, named, tail.G, 0.0, X_K=layer.x, mask=layer.mask, kind=layer.kind)
    return HeadNorms(head, tail.outer, tail.functional)
