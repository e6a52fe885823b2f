"""Exact Hessian spectra of one-dimensional self-attention and of scalar two-layer networks.

Each is a case of the reduction lemma (`reduction.py`): the outputs depend on the weights through a few inner
products, so that only their derivatives in those scalars are needed. Any loss enters by its gradient G and
Hessian B in the outputs. The small matrix is diagonalised; its characteristic polynomial is not used, because
roots of a cubic lose half of the digits where two outliers meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from curvescope.closed_form.reduction import ExactSpectrum, ProductBulk, product_bulk, reduced_spectrum
from curvescope.core.errors import ShapeError, UsageError

__all__ = [
    "ExactSpectrum",
    "ProductBulk",
    "attention_1d_outputs",
    "attention_1d_spectrum",
    "product_bulk",
    "reduced_spectrum",
    "two_layer_linear_spectrum",
    "two_layer_relu_spectrum",
]

Part = Literal["hessian", "ggn", "functional"]
Samples = Tensor | Sequence[Tensor]


def attention_1d_outputs(
    xs: Samples, w_Q: Tensor, w_K: Tensor, w_V: Tensor, *, scale: float | None = None
) -> Tensor:
    """Outputs f_i = Σ_h w_V^h Σ_j A^h_ij x_j of one-dimensional self-attention, samples end to end: (N,).

    The logits are a_h x_i x_j, a_h = s ⟨w_Q^h, w_K^h⟩. Shapes as in `attention_1d_spectrum`.
    """
    w_Q, w_K, w_V, s = _heads(w_Q, w_K, w_V, scale)
    mean, _, _ = _moments_1d(_samples(xs), s * (w_Q * w_K).sum(1))
    return w_V @ mean


def attention_1d_spectrum(
    xs: Samples,
    w_Q: Tensor,
    w_K: Tensor,
    w_V: Tensor,
    *,
    targets: Samples | None = None,
    G: Tensor | None = None,
    B: Tensor | None = None,
    part: Part = "hessian",
    scale: float | None = None,
    eigenvectors: bool = False,
) -> ExactSpectrum:
    """Spectrum of self-attention on sequences of scalars, one or more heads, over (w_Q, w_K, w_V).

    One head: ±b of multiplicity d_K − 1, b = s ℓ_a, and three outliers (h heads: ±b_h each and 3h). The
    derivatives of an output are ∂f/∂a = w_V x_i Var_i, ∂²f/∂a² = w_V x_i² κ_i, with the variance and the
    third central moment of x under A_i.

    Args:
        xs: one sequence (L,), or several of any lengths.
        w_Q: (d_K,), or (h, d_K) for h heads.
        w_K: as `w_Q`.
        w_V: a scalar, or (h,).
        targets: shaped as `xs`: squared error, mean over tokens, then over samples.
        G: instead of targets, the gradient of any loss in the outputs, all samples end to end: (N,).
        B: with `G`, its Hessian in the outputs, (N,) if diagonal or (N, N).
        part: the Hessian, its Gauss–Newton part JᵀBJ, or the rest.
        scale: s; 1/√d_K by default.
        eigenvectors: also return them, over (w_Q, w_K, w_V), each row-major.
    """
    w_Q, w_K, w_V, s = _heads(w_Q, w_K, w_V, scale)
    samples = _samples(xs)
    moments = _moments_1d(samples, s * (w_Q * w_K).sum(1))
    G, B = _loss(w_V @ moments[0], samples, targets, G, B)
    J, K = _derivatives_1d(torch.cat(samples), w_V, moments, G)
    found = _composed(list(zip(w_Q, w_K, strict=True)), [s] * len(w_V), J, K, G, B, part, eigenvectors)
    return _permuted(found, _interleaved(len(w_V), w_Q.shape[1], len(w_V)))


def two_layer_linear_spectrum(
    w: Tensor,
    v: Tensor,
    x: Tensor,
    *,
    targets: Tensor | None = None,
    G: Tensor | None = None,
    B: Tensor | None = None,
    part: Part = "hessian",
    eigenvectors: bool = False,
) -> ExactSpectrum:
    """Spectrum of f(x) = ⟨w, v⟩ x over (w, v), w, v ∈ ℝᵐ: ±b of multiplicity m − 1 and two outliers.

    b = ℓ_a = Σ_i G_i x_i, c = ℓ_aa = xᵀBx, and the outliers are cN/2 ± √((cN/2)² + b² + 2bc⟨w, v⟩),
    N = |w|² + |v|². `targets` means the mean squared error over the n samples; otherwise G (n,) and B, (n,)
    or (n, n), are the derivatives of any loss in the outputs.
    """
    a = (w.double() * v.double()).sum()
    G, B = _loss(a * x.double(), [x], targets, G, B)
    J = x.double()[:, None]
    return _composed([(w, v)], [1.0], J, J.new_zeros(1, 1), G, B, part, eigenvectors)


def two_layer_relu_spectrum(
    w: Tensor,
    v: Tensor,
    x: Tensor,
    *,
    targets: Tensor | None = None,
    G: Tensor | None = None,
    B: Tensor | None = None,
    part: Part = "hessian",
    eigenvectors: bool = False,
) -> ExactSpectrum:
    """Spectrum of f(x) = Σ_k v_k relu(w_k x) over (w, v), scalar inputs x.

    Neurons with w_k > 0 see only x > 0 and the others only x < 0: two linear networks, joined by the loss
    alone where B is not diagonal. Arguments as in `two_layer_linear_spectrum`; no w_k may be zero.
    """
    if bool((w == 0).any()):
        raise UsageError("expected no w_k = 0, where relu(w_k x) has a kink", hint="move it off zero")
    w, v, x = w.double(), v.double(), x.double()
    groups = [group for group in (w > 0, w < 0) if bool(group.any())]
    sides = [x.clamp(min=0) if bool(w[group][0] > 0) else x.clamp(max=0) for group in groups]
    J = torch.stack(sides, dim=1)
    pairs = [(w[group], v[group]) for group in groups]
    G, B = _loss(J @ torch.stack([(a * b).sum() for a, b in pairs]), [x], targets, G, B)
    nothing = J.new_zeros(len(pairs), len(pairs))
    found = _composed(pairs, [1.0] * len(pairs), J, nothing, G, B, part, eigenvectors)
    place = torch.cat([torch.cat([k, k + len(w)]) for k in (group.nonzero()[:, 0] for group in groups)])
    return _permuted(found, place)


def _samples(xs: Samples) -> list[Tensor]:
    """A list of float64 sequences from one or several."""
    samples = [xs] if isinstance(xs, Tensor) else list(xs)
    for x in samples:
        if x.ndim != 1 or not len(x):
            raise ShapeError(f"expected sequences of scalars (L,), got {tuple(x.shape)}")
    return [x.double() for x in samples]


def _heads(
    w_Q: Tensor, w_K: Tensor, w_V: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """w_Q, w_K as (h, d_K), w_V as (h,), and the scale of the logits."""
    w_Q, w_K = (torch.atleast_2d(w.double()) for w in (w_Q, w_K))
    w_V = torch.atleast_1d(w_V.double())
    if w_Q.ndim != 2 or w_Q.shape != w_K.shape or w_V.shape != (len(w_Q),):
        raise ShapeError(
            f"expected w_Q and w_K (h, d_K) and w_V (h,), got {tuple(w_Q.shape)}, {tuple(w_K.shape)} and "
            f"{tuple(w_V.shape)}"
        )
    return w_Q, w_K, w_V, w_Q.shape[1] ** -0.5 if scale is None else scale


def _moments_1d(samples: list[Tensor], a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and third central moment of x under each query's attention: (h, N) each."""
    found = []
    for x in samples:
        A = torch.softmax(a[:, None, None] * x[:, None] * x, dim=2)
        mean = A @ x
        centred = x - mean[:, :, None]
        found.append(torch.stack([mean, (A * centred**2).sum(2), (A * centred**3).sum(2)]))
    mean, variance, third = torch.cat(found, dim=2)
    return mean, variance, third


def _derivatives_1d(
    x: Tensor, w_V: Tensor, moments: tuple[Tensor, Tensor, Tensor], G: Tensor
) -> tuple[Tensor, Tensor]:
    """Jacobian (N, 2h) of the outputs in (a, w_V), and Σ_i G_i ∇²f_i, (2h, 2h)."""
    mean, variance, third = moments
    slope = x * variance  # (h, N), ∂ mean / ∂a
    J = torch.cat([w_V[:, None] * slope, mean]).T
    mixed = torch.diag(slope @ G)
    bend = torch.diag(w_V * ((x * x * third) @ G))
    K = torch.cat([torch.cat([bend, mixed], dim=1), torch.cat([mixed, torch.zeros_like(mixed)], dim=1)])
    return J, K


def _loss(
    outputs: Tensor, samples: list[Tensor], targets: Samples | None, G: Tensor | None, B: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradient (N,) and Hessian (N, N) of the loss in the outputs."""
    N = len(outputs)
    if targets is not None and G is None and B is None:
        y = torch.cat(_samples(targets))
        if len(y) != N:
            raise ShapeError(f"expected {N} targets, one for each token, got {len(y)}")
        weight = torch.cat([outputs.new_full((len(x),), 2 / (len(x) * len(samples))) for x in samples])
        return weight * (outputs - y), torch.diag(weight)
    if targets is not None or G is None or B is None:
        raise UsageError("expected either targets, or both G and B", hint="targets means squared error")
    if G.shape != (N,) or B.shape not in ((N,), (N, N)):
        shapes = f"{tuple(G.shape)} and {tuple(B.shape)}"
        raise ShapeError(f"expected G ({N},) and B ({N},) or ({N}, {N}), got {shapes}")
    return G.double(), (torch.diag(B) if B.ndim == 1 else B).double()


def _composed(
    pairs: list[tuple[Tensor, Tensor]],
    scales: list[float],
    J: Tensor,
    K: Tensor,
    G: Tensor,
    B: Tensor,
    part: Part,
    eigenvectors: bool,
) -> ExactSpectrum:
    """Reduction for outputs with Jacobian J (N, h + p) in the scalars and curvature K = Σ_i G_i ∇²f_i."""
    outer = J.T @ B @ J
    slope = (G @ J)[: len(pairs)]
    if part == "ggn":
        slope, hessian = torch.zeros_like(slope), outer
    elif part == "functional":
        hessian = K
    elif part == "hessian":
        hessian = outer + K
    else:
        raise UsageError(f"expected part 'hessian', 'ggn' or 'functional', got {part!r}")
    return reduced_spectrum(pairs, slope, hessian, scales=scales, eigenvectors=eigenvectors)


def _interleaved(heads: int, d: int, p: int) -> Tensor:
    """Where the entries of (w_1, v_1, w_2, v_2, …, φ) lie in (all w, all v, φ)."""
    entry = torch.arange(2 * heads * d).view(2, heads, d).transpose(0, 1).flatten()
    return torch.cat([entry, torch.arange(2 * heads * d, 2 * heads * d + p)])


def _permuted(found: ExactSpectrum, place: Tensor) -> ExactSpectrum:
    """The spectrum with entry k of its eigenvectors moved to place[k]."""
    if found.eigenvectors is None:
        return found
    return replace(found, eigenvectors=found.eigenvectors[np.argsort(place.numpy())])
