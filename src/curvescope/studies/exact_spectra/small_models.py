"""The smallest networks with known spectra, as functions of flat weights, many instances at once.

A row of θ is one instance; data have a row for each instance too, or none, and then all share them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(theta: Tensor, x: Tensor, *, heads: int = 1, score_bias: Tensor | float = 0.0) -> Tensor:
    """Self-attention on scalars, f_i = Σ_h w_V^h Σ_j A^h_ij x_j with scores ⟨w_Q^h, w_K^h⟩ x_i x_j/√d_K.

    Args:
        theta: (R, n), a row is (w_Q, w_K, w_V), n = h(2 d_K + 1), each head after head.
        x: (L,) or (R, L).
        score_bias: added to the scores (…, L, L).
    """
    R, d_K = len(theta), (theta.shape[1] // heads - 1) // 2
    w_Q, w_K, w_V = theta.split([heads * d_K, heads * d_K, heads], dim=1)
    a = (w_Q * w_K).view(R, heads, d_K).sum(2) / d_K**0.5
    x = x.expand(R, -1)
    scores = a[:, :, None, None] * (x[:, :, None] * x[:, None, :])[:, None] + score_bias
    return (w_V[:, :, None] * (torch.softmax(scores, dim=3) @ x[:, None, :, None]).squeeze(3)).sum(1)


def linear_network(theta: Tensor, x: Tensor) -> Tensor:
    """f(x) = ⟨w, v⟩ x; a row of θ is (w, v)."""
    w, v = theta.chunk(2, dim=1)
    return (w * v).sum(1, keepdim=True) * x


def relu_network(theta: Tensor, x: Tensor) -> Tensor:
    """f(x) = Σ_k v_k relu(w_k x), plus a last entry of θ if it has an odd number; a row is (w, v, bias)."""
    m = theta.shape[1] // 2
    w, v, bias = theta[:, :m], theta[:, m : 2 * m], theta[:, 2 * m :]
    hidden = torch.relu(w[:, :, None] * x.expand(len(theta), -1)[:, None, :])
    return (v[:, :, None] * hidden).sum(1) + bias.sum(1, keepdim=True)


def squared_error(f: Tensor, y: Tensor) -> Tensor:
    """Mean over the last axis of (f − y)²."""
    return (f - y).square().mean(-1)


def logistic_loss(f: Tensor, signs: Tensor) -> Tensor:
    """Cross-entropy of two classes ±1 with logit f: mean over the last axis of log(1 + exp(−y f))."""
    return torch.nn.functional.softplus(-signs * f).mean(-1)


def pointer_loss(f: Tensor, place: int) -> Tensor:
    """Cross-entropy of one of N places with logits f (…, N): its Hessian couples all outputs."""
    return torch.logsumexp(f, dim=-1) - f[..., place]
