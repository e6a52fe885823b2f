"""H_o JᵀBJ between two weights of an attention layer, as a factored term."""

from __future__ import annotations

import torch
from torch import Tensor

from curvescope.closed_form.attention.layer import AttentionLayer
from curvescope.closed_form.attention.sums.head import Head, Jacobian
from curvescope.closed_form.attention.sums.terms import COLUMN, ROW, Term


def outer_term(layer: AttentionLayer, one: Jacobian, two: Jacobian) -> Term:
    """Σ_i J_iᵀ B_i J'_i, or Σ_ij J_iᵀ B_ij J'_j when the loss couples tokens.

    B is first brought to where the two Jacobians live, W_O B W'_Oᵀ, a matrix of the size of a head.
    """
    on = two.on.translate(str.maketrans(ROW, COLUMN))
    if isinstance(layer.B, Tensor) and layer.B.dim() == 5:
        return _coupled(layer.B, one, two, on)
    if two.core is None and one.core is not None:
        return outer_term(layer, two, one).T  # B is symmetric
    B = _between(layer.B, one.space, two.space)
    if two.core is None:
        B = B if isinstance(B, Tensor) else B * Head.eye(layer.G)
        return Term(one.vectors, two.vectors, B, one.on, on, shared=B.dim() == 2)
    if isinstance(B, Tensor):
        right = (B @ two.core.flatten(2)).unflatten(2, two.core.shape[2:])
    else:
        right = B * two.core
    if one.core is None:
        return Term(one.vectors, two.vectors, right, one.on, on)
    if not one.on and not two.on:
        return Term(one.core.flatten(0, 1), right.flatten(0, 1), None, ROW, COLUMN)
    return Term(one.vectors, two.vectors, one.core, one.on, on, half=right)


def _between(B: float | Tensor, left: Tensor | None, right: Tensor | None) -> float | Tensor:
    """W_O B W'_Oᵀ for each token; a number stands for that multiple of the identity."""
    if isinstance(B, Tensor):
        B = B.flatten(0, 1)
        B = B if left is None else left @ B
        return B if right is None else B @ right.mT
    if left is None:
        return B if right is None else B * right.mT
    return B * (left if right is None else left @ right.mT)


def _coupled(B: Tensor, one: Jacobian, two: Jacobian, on: str) -> Term:
    """The term of a loss that couples tokens, B (n, L, o, L, o): its summands are pairs of queries."""
    n, L = B.shape[:2]
    B = B if one.space is None else torch.einsum("vo,niojw->nivjw", one.space, B)
    B = B if two.space is None else torch.einsum("nivjo,wo->nivjw", B, two.space)
    rows, columns = (() if side.core is None else side.core.shape[2:] for side in (one, two))
    K = None if two.core is None else two.core.flatten(2).unflatten(0, (n, L))
    if one.core is not None and K is not None and not one.on and not two.on:
        right = torch.einsum("nivjw,njws->nivs", B, K).flatten(0, 2)
        return Term(one.core.flatten(0, 1), right.unflatten(1, columns), None, ROW, COLUMN)
    core = B if K is None else torch.einsum("nivjw,njws->nivjs", B, K)
    if one.core is not None:
        core = torch.einsum("nivr,nivjs->nirjs", one.core.flatten(2).unflatten(0, (n, L)), core)
    core = core.transpose(2, 3).flatten(0, 2)
    core = core.reshape(-1, *(rows or core.shape[1:2]), *(columns or core.shape[2:]))
    left = None if one.vectors is None else one.vectors.repeat_interleave(L, dim=0)
    right = None
    if two.vectors is not None:
        right = two.vectors.unflatten(0, (n, 1, L)).expand(-1, L, -1, -1).flatten(0, 2)
    return Term(left, right, core, one.on, on)
