"""LayerNorm and RMSNorm: first, second and third derivatives, exact spectra and norms, for every ε ≥ 0.

Per token y = γ ∘ x̂ + β with x̂ = P x / σ, σ = √(|P x|²/d + ε), where P = I − 11ᵀ/d (layernorm) or I
(rmsnorm). Since x̂ = d ∇σ, the derivatives of x̂ are those of one scalar, hence symmetric in all indices:

    J = ∂x̂/∂x = (P − x̂ x̂ᵀ/d) / σ,      D²x̂ = −(x̂ ⊗ J in its three placements) / (d σ).

J has the eigenvalues 0 (layernorm, along 1), λ = ε/σ³ (along x̂) and 1/σ (the m others, m = d − 2 or
d − 1); everything below follows from that.

Third derivatives. Since x̂ = d ∇σ, Dᵏx̂ is symmetric in all k + 1 indices, cotangent included, and

    D²x̂[u,v]   = −[(x̂·u) Jv + (x̂·v) Ju + (u·Jv) x̂] / (dσ)
    D³x̂[u,v,w] = −[(u·Jv) Jw + (u·Jw) Jv + (v·Jw) Ju                      three pairings of J ⊗ J
                   + (x̂·u) D²x̂[v,w] + (x̂·v) D²x̂[u,w] + (x̂·w) D²x̂[u,v]
                   + (u·D²x̂[v,w]) x̂] / (dσ)                               four placements of x̂ ⊗ D²x̂

Every contraction costs O(d) per token; only `norm_third_tensor` forms an array of all entries. All axes but
the last are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from curvescope.core.errors import UsageError

NormKind = Literal["layernorm", "rmsnorm"]


@dataclass(frozen=True)
class NormPoint:
    """A norm at tokens x, with the quantities that its derivatives need. `norm_point` makes it."""

    x_hat: Tensor  # (…, d)
    sigma: Tensor  # (…, 1)
    eps: float
    kind: NormKind

    @property
    def d(self) -> int:
        """Width of a token."""
        return self.x_hat.shape[-1]

    @property
    def multiplicity(self) -> int:
        """m, the multiplicity of the eigenvalue 1/σ of J."""
        return max(self.d - (2 if self.kind == "layernorm" else 1), 0)

    @property
    def slope(self) -> Tensor:
        """λ = ε/σ³, the eigenvalue of J along x̂: (…, 1)."""
        return self.eps / self.sigma**3

    @property
    def jacobian(self) -> Tensor:
        """J = (P − x̂ x̂ᵀ/d)/σ, symmetric: (…, d, d)."""
        centering = project(torch.eye(self.d).to(self.x_hat), self.kind)
        outer = self.x_hat[..., :, None] * self.x_hat[..., None, :]
        return (centering - outer / self.d) / self.sigma[..., None]

    def apply(self, u: Tensor) -> Tensor:
        """Return J u in O(d)."""
        along = (self.x_hat * u).sum(-1, keepdim=True) / self.d
        return (project(u, self.kind) - self.x_hat * along) / self.sigma


def project(u: Tensor, kind: NormKind) -> Tensor:
    """P u: the mean over the last axis removed (layernorm), or u itself (rmsnorm)."""
    return u - u.mean(-1, keepdim=True) if kind == "layernorm" else u


def norm_point(x: Tensor, *, kind: NormKind = "layernorm", eps: float = 0.0) -> NormPoint:
    """Normalize tokens (…, d) and return x̂ and σ. Raise UsageError if σ of a token is zero."""
    if kind not in get_args(NormKind):
        raise UsageError(f"expected a norm of {', '.join(get_args(NormKind))}, got {kind!r}")
    if eps < 0:
        raise UsageError(f"expected eps ≥ 0, got {eps}")
    centered = project(x, kind)
    sigma = (centered.square().mean(-1, keepdim=True) + eps).sqrt()
    if x.numel() and not bool((sigma > 0).all()):
        raise UsageError(
            "expected tokens that are not constant: without eps the norm has no derivative there",
            hint="use eps > 0 or other tokens",
        )
    return NormPoint(centered / sigma, sigma, float(eps), kind)


def scaled(u: Tensor, gamma: Tensor | None) -> Tensor:
    """γ ∘ u; a norm without γ has γ = 1."""
    return u if gamma is None else gamma * u


def norm_output(at: NormPoint, gamma: Tensor | None = None, beta: Tensor | None = None) -> Tensor:
    """y = γ ∘ x̂ + β."""
    y = scaled(at.x_hat, gamma)
    return y if beta is None else y + beta


def norm_jacobian(at: NormPoint, gamma: Tensor | None = None) -> Tensor:
    """∂y/∂x = diag(γ) J: (…, d, d). (∂y/∂γ = diag(x̂), ∂y/∂β = I.)"""
    return at.jacobian if gamma is None else gamma[:, None] * at.jacobian


def norm_second_derivative(at: NormPoint, gamma: Tensor | None = None) -> Tensor:
    """∂²y_a/∂x_b∂x_c = −γ_a (J_ab x̂_c + J_ac x̂_b + J_bc x̂_a)/(dσ): (…, d, d, d)."""
    J, x = at.jacobian, at.x_hat
    three = (
        J[..., :, :, None] * x[..., None, None, :]
        + J[..., :, None, :] * x[..., None, :, None]
        + J[..., None, :, :] * x[..., :, None, None]
    )
    derivative = -three / (at.d * at.sigma[..., None, None])
    return derivative if gamma is None else gamma[:, None, None] * derivative


def norm_second_along(at: NormPoint, u: Tensor, v: Tensor) -> Tensor:
    """D²x̂[u,v]: (…, d). With a cotangent g of y = γ∘x̂ + β, ∇²⟨g, y⟩ u is D²x̂[u,γ∘g]."""
    x, Ju = at.x_hat, at.apply(u)
    inner = dot(x, u) * at.apply(v) + dot(x, v) * Ju + dot(Ju, v) * x
    return -inner / (at.d * at.sigma)


def norm_curvature(at: NormPoint, g: Tensor, gamma: Tensor | None = None) -> Tensor:
    """K_xx = ∇²_x ⟨g, y⟩ = −(w x̂ᵀ + x̂ wᵀ + κ J)/(dσ), w = J(γ∘g), κ = x̂·(γ∘g): (…, d, d)."""
    w, kappa = _input_cotangent(at, g, gamma)
    mixed = w[..., :, None] * at.x_hat[..., None, :]
    return -(mixed + mixed.mT + kappa[..., None] * at.jacobian) / (at.d * at.sigma[..., None])


def norm_gain_curvature(at: NormPoint, g: Tensor) -> Tensor:
    """K_xγ[a, k] = ∂²⟨g, y⟩/∂x_a∂γ_k = J_ka g_k: (…, d, d). K_γγ and everything of β are zero."""
    return at.jacobian * g[..., None, :]


def norm_curvature_product(
    at: NormPoint, g: Tensor, dx: Tensor, *, gamma: Tensor | None = None, dgamma: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """K (dx, dγ) in O(d) per token.

    Returns:
        h_x = D²x̂[dx, γ∘g] + J(g∘dγ), and h_γ = g ∘ J dx per token (its sum over tokens is the product's γ
        part); both (…, d).
    """
    h_x = norm_second_along(at, dx, scaled(g, gamma))
    if dgamma is not None:
        h_x = h_x + at.apply(g * dgamma)
    return h_x, g * at.apply(dx)


def norm_jacobian_spectrum(at: NormPoint) -> Tensor:
    """Eigenvalues of J (γ = 1), ascending: 0 (layernorm), ε/σ³, then m times 1/σ: (…, d)."""
    zeros = torch.zeros_like(at.sigma)
    eigenvalues = [zeros] if at.kind == "layernorm" else []
    if at.d > len(eigenvalues):
        eigenvalues.append(at.slope)
    eigenvalues.extend([1 / at.sigma] * at.multiplicity)
    return torch.cat(eigenvalues, dim=-1)


def norm_jacobian_norm(at: NormPoint, gamma: Tensor | None = None) -> Tensor:
    """‖diag(γ) J‖₂: (…). Without γ it is 1/σ, or ε/σ³ if m = 0."""
    if gamma is None:
        return norm_jacobian_spectrum(at)[..., -1]
    return torch.linalg.matrix_norm(norm_jacobian(at, gamma), ord=2)


def norm_second_derivative_norm(at: NormPoint, gamma: Tensor | None = None) -> Tensor:
    """Spectral norm of the second derivative as a d × d² matrix (a | bc): (…).

    H Hᵀ = [2|x̂|² J² + (6λ² + ‖J‖²_F) x̂x̂ᵀ]/(dσ)², so no d³ entries are formed. Without γ it is
    |x̂|/(dσ) · √max(9λ² + m/σ², 2/σ²), the second only if m > 0; at ε = 0 this is √(max(m, 2)/d)/σ².
    """
    square, sigma = dot(at.x_hat, at.x_hat), at.sigma
    m, slope = at.multiplicity, at.slope
    if gamma is None:
        largest = 9 * slope**2 + m / sigma**2
        if m:
            largest = torch.maximum(largest, 2 / sigma**2)
        return ((square * largest).sqrt() / (at.d * sigma))[..., 0]
    J = at.jacobian
    outer = at.x_hat[..., :, None] * at.x_hat[..., None, :]
    weight = 7 * slope**2 + m / sigma**2  # 6λ² + ‖J‖²_F
    gram = 2 * square[..., None] * J @ J + weight[..., None] * outer
    gram = gamma[:, None] * gram * gamma
    top = torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0)
    return top.sqrt() / (at.d * sigma[..., 0])


def norm_curvature_spectrum(at: NormPoint, g: Tensor, gamma: Tensor | None = None) -> Tensor:
    """Eigenvalues of K_xx, ascending: (…, d), without an eigenvalue problem.

    0 (layernorm), −κ/(dσ²) (m − 1 times), and the two of −[[3λκ, r], [r, κ/σ]]/(dσ) on span(x̂, w), with
    r = |x̂| |w − x̂ (x̂·w)/|x̂|²|; only −3λκ/(dσ) if m = 0. All are 0 at x̂ = 0.
    """
    w, kappa = _input_cotangent(at, g, gamma)
    eigenvalues = [torch.zeros_like(kappa)] if at.kind == "layernorm" else []
    first, second = 3 * at.slope * kappa, kappa / at.sigma
    if at.multiplicity == 0:
        eigenvalues.extend([first] if at.d > len(eigenvalues) else [])
    else:
        square = dot(at.x_hat, at.x_hat)
        share = torch.where(square > 0, dot(at.x_hat, w) / torch.where(square > 0, square, 1.0), 0.0)
        r = (square * (w - at.x_hat * share).square().sum(-1, keepdim=True)).sqrt()
        half = torch.hypot((first - second) / 2, r)
        eigenvalues.extend([(first + second) / 2 + half, (first + second) / 2 - half])
        eigenvalues.extend([second] * (at.multiplicity - 1))
    return (-torch.cat(eigenvalues, dim=-1) / (at.d * at.sigma)).sort(dim=-1).values


def norm_curvature_norm(at: NormPoint, g: Tensor, gamma: Tensor | None = None) -> Tensor:
    """‖K_xx‖₂, exact: (…). At ε = 0, m > 0: (|κ|/(2σ) + √(κ²/(4σ²) + d|w|²))/(dσ)."""
    return norm_curvature_spectrum(at, g, gamma).abs().amax(-1)


def norm_curvature_supremum(at: NormPoint) -> Tensor:
    """max ‖K_xx‖₂ over cotangents of unit length (γ = 1), exact: (…).

    For a symmetric tensor the maximum lies at three equal directions: max 3t(1 − t²)/(√d σ²) over
    0 ≤ t ≤ √η, η = |x̂|²/d. It is (2/√3)/(√d σ²) if η ≥ 1/3 and m > 0; with m = 0 only t = √η is possible.
    """
    t = (dot(at.x_hat, at.x_hat) / at.d).sqrt()
    if at.multiplicity:
        t = t.clamp(max=3**-0.5)
    return (3 * t * (1 - t**2) / (at.d**0.5 * at.sigma**2))[..., 0]


def norm_curvature_trace(at: NormPoint, g: Tensor, gamma: Tensor | None = None) -> Tensor:
    """tr K_xx = −(2 x̂·w + κ tr J)/(dσ): (…)."""
    w, kappa = _input_cotangent(at, g, gamma)
    trace = norm_jacobian_spectrum(at).sum(-1, keepdim=True)
    return (-(2 * dot(at.x_hat, w) + kappa * trace) / (at.d * at.sigma))[..., 0]


def norm_curvature_frobenius(at: NormPoint, g: Tensor, gamma: Tensor | None = None) -> Tensor:
    """‖K_xx‖_F, from ‖·‖²(dσ)² = 2|w|²|x̂|² + 2(w·x̂)² + 4κ x̂ᵀJw + κ²‖J‖²_F: (…)."""
    w, kappa = _input_cotangent(at, g, gamma)
    x = at.x_hat
    square = norm_jacobian_spectrum(at).square().sum(-1, keepdim=True)
    total = 2 * dot(w, w) * dot(x, x) + 2 * dot(w, x) ** 2 + 4 * kappa * dot(x, at.apply(w))
    return ((total + kappa**2 * square).clamp(min=0).sqrt() / (at.d * at.sigma))[..., 0]


def _input_cotangent(at: NormPoint, g: Tensor, gamma: Tensor | None) -> tuple[Tensor, Tensor]:
    """w = J(γ∘g) (…, d) and κ = x̂·(γ∘g) (…, 1)."""
    pulled = scaled(g, gamma)
    return at.apply(pulled), dot(at.x_hat, pulled)


def dot(u: Tensor, v: Tensor) -> Tensor:
    """u · v over the last axis, which stays with length one."""
    return (u * v).sum(-1, keepdim=True)


def norm_third_along(at: NormPoint, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """D³x̂[u,v,w]: (…, d). With a cotangent g of y = γ∘x̂ + β, ∇³⟨g, y⟩[u,v,·] is D³x̂[u,v,γ∘g]."""
    x = at.x_hat
    Ju, Jv, Jw = at.apply(u), at.apply(v), at.apply(w)
    vw = norm_second_along(at, v, w)
    pairs = dot(u, Jv) * Jw + dot(u, Jw) * Jv + dot(v, Jw) * Ju
    placements = (
        dot(x, u) * vw
        + dot(x, v) * norm_second_along(at, u, w)
        + dot(x, w) * norm_second_along(at, u, v)
        + dot(u, vw) * x
    )
    return -(pairs + placements) / (at.d * at.sigma)


def norm_third_derivative(
    at: NormPoint,
    dx: Tensor,
    *,
    gamma: Tensor | None = None,
    dgamma: Tensor | None = None,
) -> Tensor:
    """D³y[δ,δ,δ] of y = γ∘x̂ + β along δ = (dx, dγ): γ ∘ D³x̂[dx,dx,dx] + 3 dγ ∘ D²x̂[dx,dx], (…, d)."""
    derivative = scaled(norm_third_along(at, dx, dx, dx), gamma)
    return derivative if dgamma is None else derivative + 3 * dgamma * norm_second_along(at, dx, dx)


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
    """∂³y_a/∂x_b∂x_c∂x_e: (…, d, d, d, d). Symmetric in all four indices without γ."""
    J, x, S = at.jacobian, at.x_hat, norm_second_derivative(at)
    total = sum(
        torch.einsum(f"...{pair},...{rest}->...abce", J, J)
        for pair, rest in (("ab", "ce"), ("ac", "be"), ("ae", "bc"))
    )
    total = total + sum(
        torch.einsum(f"...{one},...{three}->...abce", x, S)
        for one, three in (("a", "bce"), ("b", "ace"), ("c", "abe"), ("e", "abc"))
    )
    derivative = -total / (at.d * at.sigma[..., None, None, None])
    return derivative if gamma is None else gamma[:, None, None, None] * derivative


def norm_third_supremum(at: NormPoint) -> Tensor:
    """max |D³x̂[u,v,w]| over u, v, w of unit length, exact: (…). It is 3/(dσ³) if m > 0.

    For a symmetric tensor the maximum lies at equal directions, where the form is
    −3 (p − t²)(p − 5t²)/(dσ³), p = |Pu|², t = x̂·u/√d; |…| is largest at u ⊥ x̂. With m = 0 only t² = |x̂|²/d
    is possible.
    """
    largest = 3 / (at.d * at.sigma**3)
    if not at.multiplicity:
        share = dot(at.x_hat, at.x_hat) / at.d
        width = 0.0 if at.kind == "layernorm" and at.d == 1 else 1.0  # P = 0 for a single centered entry
        largest = width * largest * ((1 - share) * (1 - 5 * share)).abs()
    return largest[..., 0]
