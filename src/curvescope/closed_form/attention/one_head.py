"""Closed-form Hessian of one attention head: all blocks of W_Q, W_K, W_V, and of their biases.

    F = A v,  A = softmax(scale · q kᵀ + bias) over the keys that `mask` allows,
    q = x W_Q,  k = x W_K,  v = x W_V.

For any loss ℓ(F), given by G = ∂ℓ/∂F and B = ∂²ℓ/∂F² (see `loss_curvature` for two of them), with
EK_i = Cov_i(v, k), E_i = Cov_i(v, x), m_i = Σ_j A_ij x_j and s the scale:

    block  H_o                                  H_f
    QQ     s² Σ x_ia x_ib (EKᵀ B EK)_ce         s² Σ x_ia x_ib C3_i(k, k)_ce
    QK     s² Σ x_ia q_ie (EKᵀ B E)_cb          s² Σ x_ia q_ie C3_i(k, x)_cb + s (Xᵀ τ X)_ab δ_ce
    KK     s² Σ q_ic q_ie (Eᵀ B E)_ab           s² Σ q_ic q_ie C3_i(x, x)_ab
    QV     s Σ x_ia m_ib (B EK)_wc              s Σ x_ia G_iw Cov_i(k, x)_cb
    KV     s Σ q_ic m_ib (B E)_wa               s Σ q_ic G_iw Cov_i(x, x)_ab
    VV     Σ m_ia m_ib B_vw                     0

Cov_i and C3_i, the second and third moments under the attention weights of query i, are in
`sums.head`. Several heads and an output projection: `multihead`. Ormaniec et al. (2025,
Theorems 3.1 and 3.2) state the same blocks with Kronecker products: `printed.kronecker`.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from curvescope.closed_form.attention.hessian import AttentionCurvature
from curvescope.closed_form.attention.layer import AttentionOptions, make_layer


def curvature(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    G: Tensor,
    B: float | Tensor,
    *,
    b_Q: Tensor | None = None,
    b_K: Tensor | None = None,
    b_V: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> AttentionCurvature:
    """Return the Hessian of ℓ(F) in the weights of one head, as an object that forms blocks on request.

    Args:
        X: inputs (L, d), or (n, L, d) for the sum over n samples.
        W_Q: (d, d_K), as W_K; W_V is (d, d_V).
        G: ∂ℓ/∂F, shaped like F, (L, d_V) or (n, L, d_V).
        B: ∂²ℓ/∂F²: a number c for c·I, (L, d_V, d_V) for a loss that is a sum over tokens, or
            (L, d_V, L, d_V); with a first axis n if X has it. Samples are not coupled.
        b_Q: (d_K,), as b_K; b_V is (d_V,). Their blocks are called "b_Q" and so on, and have one row.
        **options: see `AttentionOptions`; mask and bias broadcast to (L, S) or (n, L, S).
    """
    weights = {"Q": W_Q, "b_Q": b_Q, "K": W_K, "b_K": b_K, "V": W_V, "b_V": b_V}
    return AttentionCurvature(make_layer(X, weights, G, B, **_one_head(options)))


def merged_curvature(
    X: Tensor,
    W_QK: Tensor,
    W_V: Tensor,
    G: Tensor,
    B: float | Tensor,
    *,
    b_V: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> AttentionCurvature:
    """Return the Hessian of a head with scores scale · x_iᵀ W_QK x_j + bias_ij and weights "QK" and "V".

    Scores are linear in W_QK, so ∂²t = 0, and H_f consists of the third moment only: the indefinite term
    s (Xᵀ τ X) ⊗ I of the factors W_Q W_Kᵀ is absent.

    Args:
        X: inputs (L, d) or (n, L, d).
        W_QK: (d, d), the first index on the query's side.
        **options: as for `curvature`, without rope; `scale` is 1 unless given, because d_K is unknown.
    """
    options.setdefault("scale", 1.0)
    layer = make_layer(X, {"QK": W_QK, "V": W_V, "b_V": b_V}, G, B, **_one_head(options))
    return AttentionCurvature(layer)


def _one_head(options: AttentionOptions) -> AttentionOptions:
    """Return the options with a head axis after the sample axis of mask and bias."""
    widened: AttentionOptions = {**options}
    for what in ("mask", "bias"):
        table = options.get(what)
        if table is not None and table.dim() == 3:
            widened[what] = table[:, None]
    return widened
