"""Closed-form Hessian of multi-head attention, with output projection, biases and grouped-query heads.

    F = Σ_h O_h W_O^h + b_O,   O_h = A_h v_h.

The gradient at the output of a head is G_h = G W_O^hᵀ. Different heads are coupled in H_o only, H_o(θ_h,
θ'_g) = Σ_i J_hiᵀ B_i J_gi. H_f is zero for Q, K, V and O of different heads, for W_O with itself, and for b_O
with anything. Heads that share keys and values add their blocks. Weights are matrices of all heads: heads are
column groups of W_Q, W_K, W_V and row groups of W_O.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from curvescope.closed_form.attention.hessian import AttentionCurvature
from curvescope.closed_form.attention.layer import AttentionOptions, make_layer


def multihead_curvature(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    W_O: Tensor,
    G: Tensor,
    B: float | Tensor,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    b_Q: Tensor | None = None,
    b_K: Tensor | None = None,
    b_V: Tensor | None = None,
    b_O: Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> AttentionCurvature:
    """Return the Hessian of ℓ(F) in the weights of a layer, as an object that forms blocks on request.

    Args:
        X: inputs (L, d), or (n, L, d) for the sum over n samples.
        W_Q: (d, h d_K), heads as columns; W_K (d, h_kv d_K) and W_V (d, h_kv d_V) likewise.
        W_O: (h d_V, d_out), heads as rows.
        G: ∂ℓ/∂F, (L, d_out) or (n, L, d_out).
        B: ∂²ℓ/∂F² as a number, (L, d_out, d_out) or (L, d_out, L, d_out); with n in front when X has it.
        num_heads: query heads h.
        num_kv_heads: h_kv, which divides h and is h unless given; query head i uses key-value head
            i // (h / h_kv).
        b_Q: (h d_K,); b_K (h_kv d_K,), b_V (h_kv d_V,) and b_O (d_out,) likewise.
        **options: see `AttentionOptions`; mask and bias broadcast to (n, h, L, S).
    """
    weights = {"Q": W_Q, "b_Q": b_Q, "K": W_K, "b_K": b_K, "V": W_V, "b_V": b_V, "O": W_O, "b_O": b_O}
    layer = make_layer(X, weights, G, B, num_heads=num_heads, num_kv_heads=num_kv_heads, **options)
    return AttentionCurvature(layer)
