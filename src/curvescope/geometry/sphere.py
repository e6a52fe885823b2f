"""Geometry of a norm on a stream: projection, sphere, ellipsoid, and folding into weights.

With P = I − 1 1ᵀ/d for LayerNorm and P = I for RMSNorm,

    n(x) = √d Px / √(|Px|² + d ε),        norm(x) = γ ∘ n(x) + β.

n(x) lies on a sphere of radius √d (slightly less because of ε), for LayerNorm within the hyperplane
orthogonal to 1. γ turns the sphere into an ellipsoid, β shifts it. Vectors are rows: y = x W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.result import Result

NormKind = Literal["layernorm", "rmsnorm", "none"]


@dataclass(frozen=True, eq=False)
class StreamNorm:
    """A norm on the stream: kind, γ and β (None means 1 and 0), ε. `name` is its role, such as L0.ln1."""

    kind: NormKind = "layernorm"
    gamma: Tensor | None = None
    beta: Tensor | None = None
    eps: float = 1e-5
    name: str = ""

    def sphere(self, x: Tensor) -> Tensor:
        """Return n(x), before γ and β."""
        return normalize(x, kind=self.kind, eps=self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """γ ∘ n(x) + β."""
        y = self.sphere(x)
        y = y if self.gamma is None else y * self.gamma
        return y if self.beta is None else y + self.beta

    def direction(self, a: Tensor) -> Tensor:
        """Return P(γ ∘ a), the factor of n(x) in a · norm(x) = n(x) · P(γ ∘ a) + β · a."""
        return project(a if self.gamma is None else a * self.gamma, kind=self.kind)

    def shift(self, a: Tensor) -> Tensor:
        """Return β · a, the constant part of a · norm(x)."""
        return a.new_zeros(a.shape[:-1]) if self.beta is None else a @ self.beta

    def attainable(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and greatest a · norm(x) over all x, like the function `attainable`."""
        return attainable(a, gamma=self.gamma, beta=self.beta, kind=self.kind)


def project(x: Tensor, *, kind: NormKind = "layernorm") -> Tensor:
    """Return P x: x minus its mean over the last axis for LayerNorm, x itself otherwise."""
    return x - x.mean(-1, keepdim=True) if kind == "layernorm" else x


def normalize(x: Tensor, *, kind: NormKind = "layernorm", eps: float = 0.0) -> Tensor:
    """Return n(x) = √d Px / √(|Px|² + d ε) over the last axis; x itself for kind "none"."""
    if kind == "none":
        return x
    x = project(x, kind=kind)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def radius(x: Tensor, *, kind: NormKind = "layernorm", eps: float = 0.0) -> Tensor:
    """Return |n(x)| = √d |Px| / √(|Px|² + d ε), which is √d for ε = 0."""
    d, square = x.shape[-1], project(x, kind=kind).square().sum(-1)
    return square.sqrt() if kind == "none" else (d * square / (square + d * eps)).sqrt()


def unscale(
    y: Tensor, *, gamma: Tensor | None = None, beta: Tensor | None = None, kind: NormKind = "layernorm"
) -> Tensor:
    """Return n(x) = (y − β)/γ from norm(x) = y.

    Coordinates with γ = 0 are lost. For LayerNorm they get equal values so that the mean is 0, else 0.
    Folded weights do not read them.
    """
    n = y if beta is None else y - beta
    if gamma is None:
        return n
    lost = gamma == 0
    n = torch.where(lost, torch.zeros_like(n), n / torch.where(lost, torch.ones_like(gamma), gamma))
    if kind == "layernorm" and bool(lost.any()):
        n = torch.where(lost, -n.sum(-1, keepdim=True) / lost.sum(), n)
    return n


def fold(
    W: Tensor,
    b: Tensor | None = None,
    *,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    kind: NormKind = "layernorm",
) -> tuple[Tensor, Tensor]:
    """Return Ŵ = P Γ W and b̂ = b + β W, so that norm(x) W + b = n(x) Ŵ + b̂ exactly.

    Args:
        W: (d, m), inputs × outputs; leading axes are heads.
        b: (m,); None is 0.
        gamma: γ (d,); None is 1. LayerNorm still projects.
        beta: β (d,); None is 0.
    """
    b = W.new_zeros(*W.shape[:-2], W.shape[-1]) if b is None else b
    if kind == "none":
        return W, b
    scaled = W if gamma is None else gamma[:, None] * W
    if kind == "layernorm":
        scaled = scaled - scaled.mean(-2, keepdim=True)
    return scaled, b if beta is None else b + beta @ W


def support(
    a: Tensor, *, gamma: Tensor | None = None, beta: Tensor | None = None, kind: NormKind = "layernorm"
) -> Tensor:
    """Return the greatest a · norm(x) over all x: β · a + √d |P(γ ∘ a)|, for the last axis of a."""
    return attainable(a, gamma=gamma, beta=beta, kind=kind)[1]


def attainable(
    a: Tensor, *, gamma: Tensor | None = None, beta: Tensor | None = None, kind: NormKind = "layernorm"
) -> tuple[Tensor, Tensor]:
    """Return the least and greatest a · norm(x) over all x: β · a ∓ √d |P(γ ∘ a)| (without ε).

    With γ, β of the final norm and a = u_t these are the least and greatest logit of token t.
    """
    if kind == "none":
        raise UsageError("expected a norm: without one, a product has no greatest value")
    norm = StreamNorm(kind, gamma, beta)
    size = math.sqrt(a.shape[-1]) * norm.direction(a).norm(dim=-1)
    return norm.shift(a) - size, norm.shift(a) + size


@dataclass(frozen=True)
class Ellipsoid(Result):
    """Ellipsoid of a norm's outputs: center β, semi-axes √d × the non-zero singular values of Γ P.

    Column j of `axes` is the direction of semi-axis j. For LayerNorm there are at most d − 1 semi-axes and
    every point y has (y − center) · `normal` = 0, where `normal` is 1/γ (None where a γ is 0); for any γ
    without a zero, Σ ((y − β)/γ)² = d.
    """

    center: np.ndarray  # (d,)
    semi_axes: np.ndarray  # (r,) descending
    axes: np.ndarray  # (d, r) orthonormal columns
    normal: np.ndarray | None  # (d,) LayerNorm only
    norm: str  # layernorm or rmsnorm
    name: str = ""  # the norm's role


def ellipsoid(
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    d: int | None = None,
    kind: NormKind = "layernorm",
    name: str = "",
) -> Ellipsoid:
    """Return the ellipsoid of γ ∘ n + β with |n| = √d. `d` is required if γ and β are both None."""
    width = d if gamma is None and beta is None else (gamma if gamma is not None else beta).shape[-1]  # pyright: ignore[reportOptionalMemberAccess]
    if width is None or kind == "none":
        raise ShapeError("expected γ or β or d of a norm, got none", hint="ellipsoid(gamma, beta)")
    g = torch.ones(width, dtype=torch.float64) if gamma is None else gamma.detach().double().cpu()
    b = torch.zeros(width, dtype=torch.float64) if beta is None else beta.detach().double().cpu()
    matrix = torch.diag(g)
    if kind == "layernorm":
        matrix = matrix - matrix.mean(1, keepdim=True)  # Γ P
    U, s, _ = torch.linalg.svd(matrix)
    rank = int((s > s.max() * width * torch.finfo(s.dtype).eps).sum()) if s.max() > 0 else 0
    rank = min(rank, width - 1) if kind == "layernorm" else rank
    has_normal = kind == "layernorm" and bool((g != 0).all())
    return Ellipsoid(
        center=b.numpy(),
        semi_axes=(math.sqrt(width) * s[:rank]).numpy(),
        axes=U[:, :rank].numpy(),
        normal=(1 / g).numpy() if has_normal else None,
        norm=kind,
        name=name,
    )
