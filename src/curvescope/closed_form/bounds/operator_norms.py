"""Theorem 1 of petrov2025, corrected: bounds of an attention head from operator norms.

The published theorem omits the blocks KK and VK, and bounds the norm of the softmax Jacobian by 1/L, its
value at uniform attention, although only 1/2 is a bound. This module bounds all six blocks. `printed.bounds`
has the original theorem, and `head` much tighter bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from curvescope.closed_form.bounds.head import NAMES, BlockBounds, block_bounds
from curvescope.closed_form.bounds.per_query import HeadLocals, head_locals
from curvescope.closed_form.bounds.sums import (
    ROUNDING,
    HeadInputs,
    head_inputs,
    spectral_norm,
    symmetric_sum_bound,
)
from curvescope.closed_form.objectives import squared_error, token_curvature
from curvescope.core.errors import ShapeError


@dataclass(frozen=True)
class HeadOperatorNorms:
    """Upper bounds of the norms that bound the blocks of a head."""

    X: Tensor  # ‖X‖
    q: Tensor  # ‖XW_Q‖
    W_K: Tensor  # ‖W_K‖
    M2: Tensor  # max_i ‖M2_i‖, the second moments of the tokens under attention
    T: Tensor  # max_i ‖T_i‖, the third moments tilted by the loss gradient
    J_Q: Tensor  # ‖∂F/∂W_Q‖
    J_K: Tensor
    J_V: Tensor
    G: Tensor  # ‖∂ℓ/∂F‖
    Gamma: Tensor  # ‖∂ℓ/∂(W_Q W_Kᵀ)‖
    scale: float

    def table(self, curvature: Tensor | float) -> Tensor:
        """Return bounds of the blocks Q, K, V, (3, 3), for a loss Hessian of norm `curvature`.

        b_QQ = β J_Q² + s² W_K² X² T, b_KK = β J_K² + s² q² T, b_QK = β J_Q J_K + s² W_K X q T + Γ,
        b_QV = β J_Q J_V + s G M2 W_K X, b_KV = β J_K J_V + s G M2 q, b_VV = β J_V².
        """
        J = torch.stack([self.J_Q, self.J_K, self.J_V])
        zero = torch.zeros_like(self.T)
        sides = self.scale * torch.stack([self.W_K * self.X, self.q, zero])
        third = torch.outer(sides, sides) * self.T
        third[0, 1] += self.Gamma
        third[1, 0] += self.Gamma
        third[2] = third[:, 2] = sides * self.G * self.M2
        return (curvature * torch.outer(J, J) + third) * (1 + ROUNDING)


def theorem1_corrected(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    target: Tensor,
    *,
    measured: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> BlockBounds:
    """Return bounds for one softmax head under mean squared error ‖F − target‖_F²/(L d_V).

    By default the bounds are a priori, for any mask: they use the norms of X, W_Q, W_K, W_V and the target,
    and the diameter of the tokens. `measured` uses the Jacobians, moments and residual of one forward pass.
    Shapes are as in `attention_bounds`; the mean is over all tokens and features.
    """
    head, target = head_inputs(X, W_Q, W_K, W_V, mask=mask, scale=scale), target.double()
    if target.shape != (*X.shape[:-1], W_V.shape[1]):
        raise ShapeError(f"expected a target {(*X.shape[:-1], W_V.shape[1])}, got {tuple(target.shape)}")
    if measured:
        return _measured_bounds(head, *squared_error(head.core().output @ head.W_V, target))
    c = 2 / target.numel()
    x, w = spectral_norm(head.X.flatten(0, -2)), spectral_norm(head.W_V)
    whole = c * (sqrt(X.shape[-2]) * x * w + target.norm())
    token = c * (x * w + target.norm(dim=-1).max())
    norms = a_priori_norms(head, G=whole, frobenius=whole, pulled=token * w)
    return block_bounds(NAMES, norms.table(c))


def attention_norm_bounds(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    G: Tensor,
    B: float | Tensor,
    *,
    measured: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> BlockBounds:
    """Return bounds like `theorem1_corrected`, for any loss with gradient G and Hessian B in the outputs."""
    head = head_inputs(X, W_Q, W_K, W_V, mask=mask, scale=scale)
    if measured:
        return _measured_bounds(head, G, B)
    curvature = spectral_norm(token_curvature(B, G.double().flatten(0, -2))).max()
    return block_bounds(NAMES, gradient_norms(head, G).table(curvature))


def _measured_bounds(head: HeadInputs, G: Tensor, B: float | Tensor) -> BlockBounds:
    at = head_locals(head, G, B)
    return block_bounds(NAMES, measured_norms(at).table(spectral_norm(at.B).max()))


def gradient_norms(head: HeadInputs, G: Tensor) -> HeadOperatorNorms:
    """Return a-priori norms of the head for a known loss gradient G."""
    G = G.double()
    return a_priori_norms(
        head,
        G=spectral_norm(G.flatten(0, -2)),
        frobenius=G.norm(),
        pulled=(G @ head.W_V.mT).norm(dim=-1).max(),
    )


def a_priori_norms(head: HeadInputs, *, G: Tensor, frobenius: Tensor, pulled: Tensor) -> HeadOperatorNorms:
    """Bound the norms by those of the weights, the tokens and the loss gradient.

    ‖M2_i‖ ≤ min(½‖X‖², ¼ diam²), ‖T_i‖ ≤ min(√2‖X‖, diam) ‖M2‖ max|W_V G_i|, ‖J_V‖ ≤ √L ‖X‖,
    ‖J_Q‖ ≤ s‖W_V‖‖W_K‖‖M2‖‖X‖, ‖J_K‖ ≤ s‖W_V‖‖M2‖‖X‖‖W_Q‖, ‖Γ‖ ≤ s‖X‖‖M2‖‖W_V‖‖G‖_F.

    The gradient of the loss in the outputs, all tokens stacked, enters by its spectral norm `G`, its norm
    `frobenius` = ‖G‖_F and `pulled` = max_i |W_V G_i|.
    """
    X, scale = head.X, head.scale
    x, w_Q, w_K, w_V = map(spectral_norm, (X.flatten(0, -2), head.W_Q, head.W_K, head.W_V))
    diameter = torch.cdist(X, X, compute_mode="donot_use_mm_for_euclid_dist").max()
    M2 = torch.minimum(x**2 / 2, diameter**2 / 4)
    return HeadOperatorNorms(
        X=x,
        q=x * w_Q,
        W_K=w_K,
        M2=M2,
        T=torch.minimum(sqrt(2) * x, diameter) * M2 * pulled,
        J_Q=scale * w_V * w_K * M2 * x,
        J_K=scale * w_V * M2 * x * w_Q,
        J_V=sqrt(X.shape[-2]) * x,
        G=G,
        Gamma=scale * x * M2 * w_V * frobenius,
        scale=scale,
    )


def head_curvature_norms(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> dict[str, float]:
    """Return bounds of ‖Φ_ij‖, Φ_ij = ∂²F/∂W_i∂W_j as a matrix (L d_V · entries of W_i, of W_j).

    Φ_QV and Φ_VQ: ½ √(n/d_K) ‖W_K‖‖X‖³, Φ_KV and Φ_VK: the same with W_Q; Φ_QK and Φ_KQ:
    ½ √(n/d_K) ‖W_V‖‖X‖³ + 6 ‖W_V‖‖W_K‖‖W_Q‖‖X‖⁵/d_K; n is the larger of d and d_V. The bounds are those of
    petrov2025 with ‖∂A/∂T‖ ≤ ½ and without the loss's factor.
    """
    x, q, k, v = (float(spectral_norm(A.double())) for A in (X, W_Q, W_K, W_V))
    d_K, n = W_Q.shape[1], max(W_V.shape)
    second = sqrt(n / d_K) * x**3 / 2
    mixed = second * v + 6 * v * k * q * x**5 / d_K
    values = {"QV": second * k, "KV": second * q, "QK": mixed}
    return {name: value for pair, value in values.items() for name in (pair, pair[::-1])}


def measured_norms(at: HeadLocals) -> HeadOperatorNorms:
    """Return norms measured in one forward pass; certified bounds on JᵀJ for J_Q and J_K."""
    E = at.scale * at.W_V.mT @ at.M2
    return HeadOperatorNorms(
        X=spectral_norm(at.X),
        q=spectral_norm(at.q),
        W_K=spectral_norm(at.W_K),
        M2=spectral_norm(at.M2).max(),
        T=spectral_norm(at.T).max(),
        J_Q=symmetric_sum_bound(at.X, (E @ at.W_K).mT @ (E @ at.W_K)).sqrt(),
        J_K=symmetric_sum_bound(at.q, E.mT @ E).sqrt(),
        J_V=spectral_norm(at.m),
        G=spectral_norm(at.G),
        Gamma=spectral_norm(at.Gamma),
        scale=at.scale,
    )
