"""Attention without softmax: its Hessian depends on the data through two small matrices only.

For F = s X W_Q W_Kᵀ Xᵀ X W_V and ℓ = (c/2) ‖F − Y‖², without mask, every block is made of the weights,
Σ_XX = Xᵀ X and Ω_XY = Xᵀ (F − Y), and Ω_XY of Σ_XX and Σ_XY = Xᵀ Y:

    block  H_o / (c s²)                                  H_f / (c s)
    QQ     Σ_ab (W_Kᵀ Σ W_V W_Vᵀ Σ W_K)_ce                        0
    QK     (Σ W_Q)_ae (W_Kᵀ Σ W_V W_Vᵀ Σ)_cb                      (Ω W_Vᵀ Σ)_ab δ_ce
    KK     (Σ W_V W_Vᵀ Σ)_ab (W_Qᵀ Σ W_Q)_ce                      0
    QV     (Σ W_Q W_Kᵀ Σ)_ab (W_Kᵀ Σ W_V)_cw                      Ω_aw (W_Kᵀ Σ)_cb
    KV     (Σ W_V)_aw (W_Qᵀ Σ W_Q W_Kᵀ Σ)_cb                      Σ_ab (W_Qᵀ Ω)_cw
    VV     (Σ W_K W_Qᵀ Σ W_Q W_Kᵀ Σ)_ab δ_vw                      0

All blocks of H_o are of third order in Σ_XX, and H_f has zero diagonal blocks. The softmax makes the
blocks of W_Q and W_V differ. Masks, biases, heads and other losses: `attention` with kind="linear".
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvescope.closed_form.attention.hessian import BlockParts, Pair
from curvescope.core.errors import ShapeError


def residual_covariance(
    S_XX: Tensor, S_XY: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, *, scale: float | None = None
) -> Tensor:
    """Ω_XY = Xᵀ (F − Y) = s Σ_XX W_Q W_Kᵀ Σ_XX W_V − Σ_XY: (d, d_V), or (n, d, d_V) for samples."""
    s = W_Q.shape[1] ** -0.5 if scale is None else scale
    return s * S_XX @ W_Q @ W_K.T @ S_XX @ W_V - S_XY


def blocks(
    S_XX: Tensor,
    Omega: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    c: float,
    scale: float | None = None,
) -> dict[Pair, BlockParts]:
    """Return all blocks [a, c, b, e] of the Hessian, from the two matrices of the data.

    Args:
        S_XX: Σ_XX (d, d), or (n, d, d) for the sum of the Hessians of n samples.
        Omega: Ω_XY = Xᵀ (F − Y), (d, d_V) or (n, d, d_V). For any other loss with B = c I: Xᵀ G / c.
        c: curvature of the loss, 2/(L d_V) for the mean squared error of one sample.
        scale: s, 1/√d_K unless given.
    """
    d, d_V = W_Q.shape[0], W_V.shape[1]
    S, Om = (M[None] if M.dim() == 2 else M for M in (S_XX, Omega))
    if S.shape[1:] != (d, d) or Om.shape != (S.shape[0], d, d_V):
        raise ShapeError(
            f"expected Σ_XX (d, d) and Ω_XY (d, d_V) with d = {d} and d_V = {d_V}, "
            f"got {tuple(S_XX.shape)} and {tuple(Omega.shape)}"
        )
    s = W_Q.shape[1] ** -0.5 if scale is None else scale
    upper = _upper(S, Om, W_Q, W_K, W_V, outer=c * s * s, functional=c * s)
    return upper | {(two, one): upper[one, two].T for one, two in upper if one != two}


def _upper(
    S: Tensor, Om: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, *, outer: float, functional: float
) -> dict[Pair, BlockParts]:
    """Return the six blocks of the table, for samples (n, ·, ·)."""
    SQ, SK, SV = S @ W_Q, S @ W_K, S @ W_V
    score = SQ @ SK.mT  # Σ W_Q W_Kᵀ Σ
    value = SV @ SV.mT  # Σ W_V W_Vᵀ Σ
    query = W_Q.T @ SQ  # W_Qᵀ Σ W_Q
    eye_K, eye_V = (torch.eye(W.shape[1], dtype=W.dtype, device=W.device) for W in (W_K, W_V))
    zero = [S.new_zeros(*W.shape, *W.shape) for W in (W_Q, W_K, W_V)]
    o, f, einsum = outer, functional, torch.einsum
    return {
        ("Q", "Q"): BlockParts(o * einsum("nab,nce->acbe", S, W_K.T @ value @ W_K), zero[0]),
        ("Q", "K"): BlockParts(
            o * einsum("nae,ncb->acbe", SQ, W_K.T @ value), f * einsum("nab,ce->acbe", Om @ SV.mT, eye_K)
        ),
        ("K", "K"): BlockParts(o * einsum("nab,nce->acbe", value, query), zero[1]),
        ("Q", "V"): BlockParts(
            o * einsum("nab,ncw->acbw", score, SK.mT @ W_V), f * einsum("naw,nbc->acbw", Om, SK)
        ),
        ("K", "V"): BlockParts(
            o * einsum("naw,ncb->acbw", SV, query @ SK.mT), f * einsum("nab,ncw->acbw", S, W_Q.T @ Om)
        ),
        ("V", "V"): BlockParts(o * einsum("nab,vw->avbw", SK @ query @ SK.mT, eye_V), zero[2]),
    }
