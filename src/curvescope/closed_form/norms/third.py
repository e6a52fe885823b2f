"""Third derivatives of norms, in closed form.

In the notation of `derivatives` x̂ = d ∇σ, so Dᵏx̂ is symmetric in all k + 1 indices, cotangent included, and

    D²x̂[u,v]   = −[(x̂·u) Jv + (x̂·v) Ju + (u·Jv) x̂] / (dσ)
    D³x̂[u,v,w] = −[(u·Jv) Jw + (u·Jw) Jv + (v·Jw) Ju                      three pairings of J ⊗ J
                   + (x̂·u) D²x̂[v,w] + (x̂·v) D²x̂[u,w] + (x̂·w) D²x̂[u,v]
                   + (u·D²x̂[v,w]) x̂] / (dσ)                               four placements of x̂ ⊗ D²x̂

Every contraction costs O(d) per token; only `norm_third_tensor` forms an array of all entries. Axes in front
of the last are tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvescope.closed_form.norms.derivatives import (
    NormPoint,
    dot,
    norm_second_along,
    norm_second_derivative,
    scaled,
)


def norm_third_along(at: NormPoint, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """D³x̂[u,v,w]: (…, d). With a cotangent g of y = γ∘x̂ + β, ∇³⟨g, y⟩[u,v,·] is D³x̂[u,v,γ∘g]."""
    x = at.x_hat
    Ju, Jv, Jw = at.apply(u), at.apply(v), at.apply(w)
    vw = norm_second_along(at, v, w)
    pairs = dot(u, Jv) * Jw + dot(u, Jw) * Jv + dot(v, Jw) * Ju
    moved = (
        dot(x, u) * vw
        + dot(x, v) * norm_second_along(at, u, w)
        + dot(x, w) * norm_second_along(at, u, v)
        + dot(u, vw) * x
    )
    return -(pairs + moved) / (at.d * at.sigma)


def norm_third_derivative(
    at: NormPoint,
    dx: Tensor,
    *,
    gamma: Tensor | None = None,
    dgamma: Tensor | None = None,
) -> Tensor:
    """D³y[δ,δ,δ] of y = γ∘x̂ + β along δ = (dx, dγ): γ ∘ D³x̂[dx,dx,dx] + 3 dγ ∘ D²x̂[dx,dx], (…, d)."""
    found = scaled(norm_third_along(at, dx, dx, dx), gamma)
    return found if dgamma is None else found + 3 * dgamma * norm_second_along(at, dx, dx)


def norm_third_product(
    at: NormPoint,
    g: Tensor,
    dx: Tensor,
    *,
    gamma: Tensor | None = None,
    dgamma: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """∇³⟨g, y⟩[δ,δ,·] of y = γ∘x̂ + β along δ = (dx, dγ).

    Returns:
        Its part in x, D³x̂[dx,dx,γ∘g] + 2 D²x̂[dx, g∘dγ], and its part in γ per token (summed over tokens it
        is the part of the shared γ), g ∘ D²x̂[dx,dx]; both (…, d). Its part in β is zero.
    """
    h_x = norm_third_along(at, dx, dx, scaled(g, gamma))
    if dgamma is not None:
        h_x = h_x + 2 * norm_second_along(at, dx, g * dgamma)
    return h_x, g * norm_second_along(at, dx, dx)


def norm_third_tensor(at: NormPoint, gamma: Tensor | None = None) -> Tensor:
    """∂³y_a/∂x_b∂x_c∂x_e: (…, d, d, d, d). Symmetric in all four indices where there is no γ."""
    J, x, S = at.jacobian, at.x_hat, norm_second_derivative(at)
    total = sum(
        torch.einsum(f"...{pair},...{rest}->...abce", J, J)
        for pair, rest in (("ab", "ce"), ("ac", "be"), ("ae", "bc"))
    )
    total = total + sum(
        torch.einsum(f"...{one},...{three}->...abce", x, S)
        for one, three in (("a", "bce"), ("b", "ace"), ("c", "abe"), ("e", "abc"))
    )
    found = -total / (at.d * at.sigma[..., None, None, None])
    return found if gamma is None else gamma[:, None, None, None] * found


def norm_third_supremum(at: NormPoint) -> Tensor:
    """max |D³x̂[u,v,w]| over u, v, w of unit length, exact: (…). It is 3/(dσ³) wherever J has a 1/σ (m > 0).

    For a symmetric tensor the maximum lies at equal directions, where the form is
    −3 (p − t²)(p − 5t²)/(dσ³), p = |Pu|², t = x̂·u/√d; |…| is largest at u ⊥ x̂. With m = 0 only t² = |x̂|²/d
    is there.
    """
    largest = 3 / (at.d * at.sigma**3)
    if not at.multiplicity:
        share = dot(at.x_hat, at.x_hat) / at.d
        width = 0.0 if at.kind == "layernorm" and at.d == 1 else 1.0  # P = 0 for a single centered entry
        largest = width * largest * ((1 - share) * (1 - 5 * share)).abs()
    return largest[..., 0]
