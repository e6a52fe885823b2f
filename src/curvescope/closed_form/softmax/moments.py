"""Attention moments: mean, covariance and third central moment of the tokens under each query's weights.

    M₁,i = Σ_j A_ij x_j,   M₂,i = Σ_j A_ij x̃ x̃ᵀ,   M₃,i = Σ_j A_ij x̃ ⊗ x̃ ⊗ x̃,   x̃ = x_j − M₁,i.

They are what the data enter the Hessian of softmax attention through (Ormaniec et al. 2025, section 3): the
derivatives of log Σ_j exp(x_j · u) at the query's u.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.closed_form.softmax.deviations import centered
from curvescope.core.errors import ShapeError, UsageError


@dataclass(frozen=True)
class AttentionMoments:
    """The first three moments, one of each per query."""

    M1: Tensor  # (…, L, d)
    M2: Tensor  # (…, L, d, d), symmetric
    M3: Tensor  # (…, L, d, d, d), symmetric in its last three axes


def attention_moments(A: Tensor, X: Tensor) -> AttentionMoments:
    """The moments of tokens X (…, S, d) under attention weights A (…, L, S); leading axes broadcast.

    Rows of A are distributions; a row of zeros, a query that sees nothing, has moments zero. A moment keeps
    its digits however concentrated its row is: differences to the most attended token come first.
    """
    deviation = deviations(A, X)
    weighted = A[..., None] * deviation
    M2 = weighted.mT @ deviation
    M3 = torch.einsum("...ija,...ijb,...ijc->...iabc", weighted, deviation, deviation)
    return AttentionMoments(A @ X, M2, M3)


def third_moment_along(A: Tensor, X: Tensor, U: Tensor) -> Tensor:
    """M₃,i contracted with one vector per query, Σ_j A_ij (x̃ · u_i) x̃ x̃ᵀ: (…, L, d, d), no d³ array.

    U is (…, L, d).
    """
    deviation = deviations(A, X)
    weight = A * (deviation @ U[..., None])[..., 0]
    return (weight[..., None] * deviation).mT @ deviation


def deviations(A: Tensor, X: Tensor) -> Tensor:
    """x̃_ij = x_j − Σ_l A_il x_l, (…, L, S, d)."""
    _check(A, X)
    return centered(A[..., :, None, :], X.mT[..., None, :, :]).mT


def _check(A: Tensor, X: Tensor) -> None:
    if A.dim() < 2 or X.dim() < 2 or A.shape[-1] != X.shape[-2]:
        raise ShapeError(
            f"expected weights (…, L, S) and tokens (…, S, d), got {tuple(A.shape)} and {tuple(X.shape)}"
        )
    total = A.sum(-1)
    slack = torch.finfo(A.dtype).eps ** 0.5
    if bool(((total - 1).abs().minimum(total.abs()) > slack).any()) or bool((A < 0).any()):
        raise UsageError(
            "expected every row of A to be non-negative and to sum to one, or to be zero",
            hint="moments are of softmax attention; linear attention has none",
        )
