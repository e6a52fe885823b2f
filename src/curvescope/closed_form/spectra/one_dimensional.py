"""Exact Hessian spectra of one-dimensional self-attention and of scalar two-layer networks.

Each is a case of the reduction lemma (`reduction`). The outputs depend on the weights through a few inner
products, so only their derivatives in those scalars are needed. Any loss enters through its gradient G and
Hessian B in the outputs. The code diagonalizes a small matrix and avoids its characteristic polynomial,
because roots of a cubic lose half of their digits if two outliers coincide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from curvescope.closed_form.softmax import cumulants
from curvescope.closed_form.spectra.reduction import (
    ExactSpectrum,
    ProductBulk,
    product_bulk,
    reduced_spectrum,
)
from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.hessian_terms import MatrixName, check_matrix_name

__all__ = [
    "ExactSpectrum",
    "ProductBulk",
    "SpectrumOptions",
    "attention_1d_outputs",
    "attention_1d_spectrum",
    "product_bulk",
    "reduced_spectrum",
    "two_layer_linear_spectrum",
    "two_layer_relu_spectrum",
]

Samples = Tensor | Sequence[Tensor]


class SpectrumOptions(TypedDict, total=False):
    """Options: the loss, and the part of its spectrum."""

    targets: Samples | None  # squared error: the mean over tokens, then over samples
    G: Tensor | None  # instead of targets, the gradient of any loss in the concatenated outputs: (N,)
    B: Tensor | None  # with G, its Hessian in the outputs, (N,) if diagonal or (N, N)
    part: MatrixName  # "hessian" unless given, its GGN JᵀBJ ("ggn"), or the difference ("functional")
    eigenvectors: bool  # also return them, each weight row-major


def attention_1d_outputs(
    xs: Samples,
    w_Q: Tensor,
    w_K: Tensor,
    w_V: Tensor,
    *,
    scale: float | None = None,
    score_bias: Samples | None = None,
) -> Tensor:
    """Return f_i = Σ_h w_V^h Σ_j A^h_ij x_j of one-dimensional self-attention, samples concatenated: (N,).

    The logits are a_h x_i x_j + β_ij, a_h = s ⟨w_Q^h, w_K^h⟩. Shapes as in `attention_1d_spectrum`.
    """
    w_Q, w_K, w_V, s = _heads(w_Q, w_K, w_V, scale)
    samples = _samples(xs)
    mean, _, _ = _moments_1d(samples, s * (w_Q * w_K).sum(1), _biases(samples, score_bias))
    return w_V @ mean


def attention_1d_spectrum(
    xs: Samples,
    w_Q: Tensor,
    w_K: Tensor,
    w_V: Tensor,
    *,
    scale: float | None = None,
    score_bias: Samples | None = None,
    **options: Unpack[SpectrumOptions],
) -> ExactSpectrum:
    """Return the spectrum of self-attention on sequences of scalars, over (w_Q, w_K, w_V) of all heads.

    One head: ±b of multiplicity d_K − 1, b = s ℓ_a, and three outliers (h heads: ±b_h each and 3h). The
    derivatives of an output are ∂f/∂a = w_V x_i Var_i, ∂²f/∂a² = w_V x_i² κ_i, with the variance and the
    third central moment of x under A_i. A bias of the scores changes A, but no formula. The loss of `targets`
    is the mean squared error over the tokens of a sample, then over samples, so tokens of short samples have
    larger weights.

    Args:
        xs: one sequence (L,), or several sequences of any lengths.
        w_Q: (d_K,), or (h, d_K) for h heads.
        w_K: like `w_Q`.
        w_V: a scalar, or (h,).
        scale: s; 1/√d_K by default.
        score_bias: β added to the scores of all heads, for each sequence (L,), one number per key, or (L, L).
        **options: see `SpectrumOptions`; `targets` shaped like `xs`, or `G` and `B`.
    """
    w_Q, w_K, w_V, s = _heads(w_Q, w_K, w_V, scale)
    samples = _samples(xs)
    moments = _moments_1d(samples, s * (w_Q * w_K).sum(1), _biases(samples, score_bias))
    J, bend = _derivatives_1d(torch.cat(samples), w_V, moments)
    pairs = list(zip(w_Q, w_K, strict=True))
    spectrum = _spectrum(w_V @ moments[0], samples, pairs, J, bend, scale=s, **options)
    return _permuted(spectrum, _interleaved(len(w_V), w_Q.shape[1], len(w_V)))


def two_layer_linear_spectrum(
    w: Tensor, v: Tensor, x: Tensor, **options: Unpack[SpectrumOptions]
) -> ExactSpectrum:
    """Return the spectrum of f(x) = ⟨w, v⟩ x over (w, v), w, v ∈ ℝᵐ: ±b, each m − 1 times, and two outliers.

    b = ℓ_a = Σ_i G_i x_i, c = ℓ_aa = xᵀBx, and the outliers are cN/2 ± √((cN/2)² + b² + 2bc⟨w, v⟩),
    N = |w|² + |v|². Options: see `SpectrumOptions`; the n inputs x (n,) are one sample.
    """
    return _two_layer([(w.double(), v.double())], x.double()[:, None], **options)


def two_layer_relu_spectrum(
    w: Tensor, v: Tensor, x: Tensor, **options: Unpack[SpectrumOptions]
) -> ExactSpectrum:
    """Return the spectrum of f(x) = Σ_k v_k relu(w_k x) over (w, v), for scalar inputs x.

    Neurons with w_k > 0 are active for x > 0 only, the others for x < 0 only. These are two linear networks,
    which only a non-diagonal B couples. Arguments are those of `two_layer_linear_spectrum`; no w_k may be
    zero.
    """
    if bool((w == 0).any()):
        raise UsageError("expected no w_k = 0, where relu(w_k x) has a kink", hint="use a small nonzero w_k")
    w, v, x = w.double(), v.double(), x.double()
    sides = [(w > 0, x.clamp(min=0)), (w < 0, x.clamp(max=0))]
    sides = [(group, inputs) for group, inputs in sides if bool(group.any())]
    J = torch.stack([inputs for _, inputs in sides], dim=1)
    spectrum = _two_layer([(w[group], v[group]) for group, _ in sides], J, **options)
    positions = torch.cat([torch.cat([k, k + len(w)]) for k in (group.nonzero()[:, 0] for group, _ in sides)])
    return _permuted(spectrum, positions)


def _two_layer(
    pairs: list[tuple[Tensor, Tensor]], J: Tensor, **options: Unpack[SpectrumOptions]
) -> ExactSpectrum:
    """Spectrum of f = Σ_r ⟨w_r, v_r⟩ J_r for pairs of vectors and inputs J (n, h)."""
    outputs = J @ torch.stack([(w * v).sum() for w, v in pairs])
    return _spectrum(outputs, [outputs], pairs, J, lambda G: J.new_zeros(J.shape[1], J.shape[1]), **options)


def _samples(xs: Samples) -> list[Tensor]:
    """Return a list of float64 sequences from one or several sequences."""
    samples = [xs] if isinstance(xs, Tensor) else list(xs)
    for x in samples:
        if x.ndim != 1 or not len(x):
            raise ShapeError(f"expected sequences of scalars (L,), got {tuple(x.shape)}")
    return [x.double() for x in samples]


def _heads(
    w_Q: Tensor, w_K: Tensor, w_V: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return w_Q, w_K as (h, d_K), w_V as (h,), and the scale of the logits."""
    w_Q, w_K = (torch.atleast_2d(w.double()) for w in (w_Q, w_K))
    w_V = torch.atleast_1d(w_V.double())
    if w_Q.ndim != 2 or w_Q.shape != w_K.shape or w_V.shape != (len(w_Q),):
        raise ShapeError(
            f"expected w_Q and w_K (h, d_K) and w_V (h,), got {tuple(w_Q.shape)}, {tuple(w_K.shape)} and "
            f"{tuple(w_V.shape)}"
        )
    return w_Q, w_K, w_V, w_Q.shape[1] ** -0.5 if scale is None else scale


def _biases(samples: list[Tensor], score_bias: Samples | None) -> list[Tensor]:
    """Return the biases of the scores of each sequence; zeros (L,) by default."""
    if score_bias is None:
        return [torch.zeros_like(x) for x in samples]
    biases = [score_bias] if isinstance(score_bias, Tensor) else list(score_bias)
    if len(biases) != len(samples):
        raise ShapeError(f"expected a score bias for each of {len(samples)} sequences, got {len(biases)}")
    for bias, x in zip(biases, samples, strict=True):
        L = len(x)
        if bias.shape not in ((L,), (L, L)):
            raise ShapeError(f"expected a score bias ({L},) or ({L}, {L}), got {tuple(bias.shape)}")
    return [bias.to(x) for bias, x in zip(biases, samples, strict=True)]


def _moments_1d(samples: list[Tensor], a: Tensor, biases: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and third central moment of x under each query's attention: (h, N) each."""
    moments = []
    for x, bias in zip(samples, biases, strict=True):
        at = cumulants(torch.softmax(a[:, None, None] * x[:, None] * x + bias, dim=2), x)
        moments.append(torch.stack([at.mean, at.variance, at.third]))
    mean, variance, third = torch.cat(moments, dim=2)
    return mean, variance, third


def _derivatives_1d(
    x: Tensor, w_V: Tensor, moments: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Jacobian (N, 2h) of the outputs in (a, w_V), and G ↦ Σ_i G_i ∇²f_i, (2h, 2h)."""
    mean, variance, third = moments
    slope = x * variance  # (h, N), ∂ mean / ∂a

    def bend(G: Tensor) -> Tensor:
        own, mixed = torch.diag(w_V * ((x * x * third) @ G)), torch.diag(slope @ G)
        return torch.cat([torch.cat([own, mixed], 1), torch.cat([mixed, torch.zeros_like(mixed)], 1)])

    return torch.cat([w_V[:, None] * slope, mean]).T, bend


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


def _spectrum(
    outputs: Tensor,
    samples: list[Tensor],
    pairs: list[tuple[Tensor, Tensor]],
    J: Tensor,
    bend: Callable[[Tensor], Tensor],
    *,
    scale: float = 1.0,
    targets: Samples | None = None,
    G: Tensor | None = None,
    B: Tensor | None = None,
    part: MatrixName = "hessian",
    eigenvectors: bool = False,
) -> ExactSpectrum:
    """Reduction for outputs with Jacobian J (N, h + p) in the scalars and bend(G) = Σ_i G_i ∇²f_i."""
    check_matrix_name(part)
    G, B = _loss(outputs, samples, targets, G, B)
    slope, hessian = (G @ J)[: len(pairs)], J.T @ B @ J
    if part == "ggn":
        slope = torch.zeros_like(slope)
    else:
        hessian = bend(G) if part == "functional" else hessian + bend(G)
    return reduced_spectrum(pairs, slope, hessian, scales=[scale] * len(pairs), eigenvectors=eigenvectors)


def _interleaved(heads: int, d: int, p: int) -> Tensor:
    """Return the positions of the entries of (w_1, v_1, w_2, v_2, …, φ) in (all w, all v, φ)."""
    entry = torch.arange(2 * heads * d).view(2, heads, d).transpose(0, 1).flatten()
    return torch.cat([entry, torch.arange(2 * heads * d, 2 * heads * d + p)])


def _permuted(spectrum: ExactSpectrum, positions: Tensor) -> ExactSpectrum:
    """Return the spectrum with entry k of its eigenvectors at positions[k]."""
    if spectrum.eigenvectors is None:
        return spectrum
    return replace(spectrum, eigenvectors=spectrum.eigenvectors[np.argsort(positions.numpy())])
