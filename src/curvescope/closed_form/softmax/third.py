"""Third derivatives of the softmax, in closed form, and the cumulants that they are.

p = ∇ logsumexp, so its derivatives are joint cumulants of the directions under p. With ũ = u − Σ p u, ⟨·⟩ the
mean under p,

    D²p[u,v]   = p ∘ (ũṽ − ⟨ũṽ⟩)
    D³p[u,v,w] = p ∘ (ũṽw̃ − ⟨ũṽw̃⟩ − ũ⟨ṽw̃⟩ − ṽ⟨ũw̃⟩ − w̃⟨ũṽ⟩).

Every contraction costs O(V) per row; only the functions that end in `_tensor` form an array of all entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvescope.closed_form.softmax.deviations import centered, softmax_along


@dataclass(frozen=True)
class Cumulants:
    """Cumulants of a direction u under p = softmax(z): the derivatives of logsumexp at z along u."""

    mean: Tensor  # (…)
    variance: Tensor
    third: Tensor  # ⟨ũ³⟩
    fourth: Tensor  # ⟨ũ⁴⟩ − 3⟨ũ²⟩²


def cumulants(p: Tensor, u: Tensor) -> Cumulants:
    """κ₁ … κ₄ of u (…, V) under probabilities p (…, V).

    From the second on they are the derivatives along u of the cross-entropy ℓ = logsumexp(z) − z_y too.
    """
    du = centered(p, u)
    second, third, fourth = ((p * du**k).sum(-1) for k in (2, 3, 4))
    return Cumulants((p * u).sum(-1), second, third, fourth - 3 * second**2)


def logsumexp_third(p: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """D³ logsumexp[u,v,w] = ⟨ũṽw̃⟩, the third joint cumulant: (…)."""
    return (p * centered(p, u) * centered(p, v) * centered(p, w)).sum(-1)


def logsumexp_fourth(p: Tensor, u: Tensor, v: Tensor, w: Tensor, q: Tensor) -> Tensor:
    """D⁴ logsumexp[u,v,w,q] = ⟨ũṽw̃q̃⟩ − ⟨ũṽ⟩⟨w̃q̃⟩ − ⟨ũw̃⟩⟨ṽq̃⟩ − ⟨ũq̃⟩⟨ṽw̃⟩: (…)."""
    return (softmax_third_along(p, u, v, w) * centered(p, q)).sum(-1)


def softmax_second_along(p: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """D²softmax[u,v]: (…, V). With a cotangent g, ∇²⟨g, softmax⟩ u is D²softmax[u,g]."""
    return softmax_along(p, centered(p, u) * centered(p, v))


def softmax_third_along(p: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """D³softmax[u,v,w]: (…, V). With a cotangent g, ∇³⟨g, softmax⟩[u,v,·] is D³softmax[u,v,g]."""
    u, v, w = centered(p, u), centered(p, v), centered(p, w)
    pairs = u * _mean(p, v * w) + v * _mean(p, u * w) + w * _mean(p, u * v)
    return softmax_along(p, u * v * w) - p * pairs


def logsumexp_third_tensor(p: Tensor) -> Tensor:
    """D³ logsumexp, which is D²softmax, as an array symmetric in its indices: (…, V, V, V)."""
    basis = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    return softmax_second_along(p[..., None, None, :], basis[:, None], basis)


def softmax_third_tensor(p: Tensor) -> Tensor:
    """D³softmax, which is D⁴ logsumexp, as an array symmetric in its indices: (…, V, V, V, V)."""
    basis = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    return softmax_third_along(p[..., None, None, None, :], basis[:, None, None], basis[:, None], basis)


def _mean(p: Tensor, u: Tensor) -> Tensor:
    return (p * u).sum(-1, keepdim=True)
