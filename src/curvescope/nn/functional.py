"""Attention, norms, activations and cross-entropy with PyTorch's signatures and every second derivative.

PyTorch's fused attention cannot be differentiated twice, nor in forward mode. The functions here can:
backward, double backward, `torch.func.jvp`, `hessian`, `jacfwd`, `jacrev`, `vmap`, dual numbers, and any two
of them inside each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from curvescope.core.tensors import IGNORED
from curvescope.kernels import norms
from curvescope.kernels.activations.function import activate, plain_gelu_tanh
from curvescope.kernels.activations.gated import gated
from curvescope.kernels.attention.sdpa import RelativeBias
from curvescope.kernels.attention.sdpa import sdpa as _sdpa
from curvescope.kernels.backends import casting, forward_mode, transformed
from curvescope.kernels.cross_entropy import cross_entropy_head
from curvescope.kernels.norms.plain_norms import default_eps, plain_layer_norm, plain_rms_norm

__all__ = [
    "RelativeBias",
    "cross_entropy",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "scaled_dot_product_attention",
    "silu",
    "swiglu",
]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    score_bias: Tensor | RelativeBias | None = None,
    window: int | None = None,
    key_lengths: Tensor | None = None,
    third_order: Literal["warn", "error"] = "warn",
) -> Tensor:
    """PyTorch's function of this name, differentiable in every way.

    The first eight arguments are PyTorch's. A query that sees no key gives 0, as in PyTorch.

    All derivatives of order one and two need memory linear in the length, apart from the tensors that are
    passed: masks, biases other than a `RelativeBias`, and one byte for each score with dropout. Short
    sequences take plain operations, which are faster there, and so do derivatives of order three and,
    inside of `torch.compile`, transforms of `torch.func`: these hold all scores.

    Args:
        query: (..., H, Lq, d), with any strides.
        key: (..., H, Lk, d).
        value: (..., H, Lk, d_v).
        attn_mask: True where a query sees a key, or numbers to add to the scores; broadcast to
            (..., H, Lq, Lk). Numbers that require a gradient get one, in their own shape.
        dropout_p: Share of the weights that are set to 0; all derivatives drop the same ones.
        is_causal: Query i sees keys j ≤ i, also if Lq ≠ Lk.
        scale: 1/√d unless given.
        enable_gqa: `key` and `value` may have fewer heads, which divide H.
        score_bias: Numbers to add to the scores, beside any mask, with a gradient in their own shape. A
            `RelativeBias` needs memory linear in the length.
        window: Query i sees only keys with |i − j| < window, of those that the other arguments leave.
        key_lengths: (...,) whole numbers; keys at and after this position are not seen.
        third_order: If the sequence is long enough for the kernels, "warn" computes derivatives of order
            three and more by plain operations, in memory quadratic in the length, and warns once; "error"
            raises.

    Returns:
        (..., H, Lq, d_v).
    """
    return _sdpa(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        score_bias=score_bias,
        window=window,
        key_lengths=key_lengths,
        third_order=third_order,
    )


sdpa = scaled_dot_product_attention


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """PyTorch's function of this name.

    PyTorch's own is silently wrong if a backward pass goes through the result of forward mode, which is what
    `torch.func.hessian` and `jacrev(jacfwd(…))` do, and in third derivatives.
    """
    shape, num = tuple(normalized_shape), len(normalized_shape)
    if _plainly() or not num or input.shape[-num:] != shape:
        return plain_layer_norm(input, shape, weight, bias, eps)
    gain, shift = (None if t is None else t.flatten() for t in (weight, bias))
    return norms.layer_norm(input.flatten(-num), gain, shift, eps, third_order=True).view(input.shape)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """PyTorch's function of this name."""
    shape, num = tuple(normalized_shape), len(normalized_shape)
    eps = default_eps(input) if eps is None else eps
    if _plainly() or not num or input.shape[-num:] != shape:
        return plain_rms_norm(input, shape, weight, eps)
    gain = None if weight is None else weight.flatten()
    return norms.rms_norm(input.flatten(-num), gain, eps, third_order=True).view(input.shape)


def gelu(input: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """PyTorch's function of this name."""
    if _plainly() or approximate not in ("none", "tanh"):
        takes_over = approximate == "tanh" and (forward_mode() or transformed())
        return plain_gelu_tanh(input) if takes_over else F.gelu(input, approximate=approximate)
    return activate(input, "gelu" if approximate == "none" else "gelu_tanh", third_order=True)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """PyTorch's function of this name."""
    if inplace:
        return F.silu(input, inplace=True)
    if _plainly():
        return input * torch.sigmoid(input)  # PyTorch's own has no backward through its tangent
    return activate(input, "silu", third_order=True)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) ∘ up, the gated activation of LLaMA."""
    if _plainly() or gate.shape != up.shape or gate.dtype != up.dtype:
        return silu(gate) * up
    return gated(gate, up, "silu", third_order=True)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """PyTorch's function of this name.

    PyTorch's own has every derivative but one: a backward through the tangent of dual numbers raises.
    """
    if size_average is None and reduce is None and forward_mode() and not transformed():
        named: Any = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
        }
        return _plain_cross_entropy(input, target, weight, **named)
    return F.cross_entropy(
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


def _plain_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """F.cross_entropy with the softmax written out."""
    dim, C = min(1, input.dim() - 1), input.shape[min(1, input.dim() - 1)]
    z = input - input.detach().amax(dim, keepdim=True)
    log_p = z - z.exp().sum(dim, keepdim=True).log()
    gain = input.new_ones(C) if weight is None else weight
    weighted = log_p * gain.view(-1, *(1,) * (input.dim() - dim - 1))
    if target.is_floating_point():
        terms = -(weighted * (target * (1 - label_smoothing) + label_smoothing / C)).sum(dim)
        return _reduced(terms, reduction, max(1, terms.numel()))
    counted = target != ignore_index
    index = target.clamp(0, C - 1)
    picked = weighted.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    terms = -((1 - label_smoothing) * picked + label_smoothing / C * weighted.sum(dim)) * counted
    return _reduced(terms, reduction, (gain[index] * counted).sum())


def _reduced(terms: Tensor, reduction: str, total: Tensor | int) -> Tensor:
    if reduction == "none":
        return terms
    return terms.sum() / total if reduction == "mean" else terms.sum()


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """PyTorch's function of this name: cross_entropy(input Wᵀ + b, target), a slice of the logits at a time.

    Forward mode, targets that are probabilities, weights of classes and `reduction="none"` need all logits.
    """
    ignored = -100 if ignore_index is None else ignore_index
    fits = linear_weight.dim() == 2 and input.dim() in (1, 2) and target.dim() == input.dim() - 1
    classes = not target.is_floating_point() and weight is None and reduction in ("mean", "sum")
    one_dtype = all(t is None or t.dtype == input.dtype for t in (linear_weight, linear_bias))
    if _plainly() or not (fits and classes and one_dtype and target.numel()):
        logits = F.linear(input, linear_weight, linear_bias)
        named: Any = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": ignored}
        return cross_entropy(logits, target, weight, **named)
    rows, target = input.view(-1, input.shape[-1]), target.reshape(-1)
    if ignored != IGNORED:
        target = target.masked_fill(target == ignored, IGNORED)
    smooth = {"label_smoothing": label_smoothing, "third_order": True}
    total = cross_entropy_head(rows, linear_weight, linear_bias, target, **smooth)
    return total if reduction == "sum" else total / (target != IGNORED).sum()


def _plainly() -> bool:
    """Return True if plain operations are recorded; kernels have two reverse derivatives of eager code."""
    return casting() or forward_mode() or transformed() or torch.compiler.is_compiling()
