"""Attention, norms, activations and cross-entropy with PyTorch's signatures and every second derivative.

PyTorch's fused attention cannot be differentiated twice, nor in forward mode. The functions here can:
backward, double backward, `torch.func.jvp`, `hessian`, `jacfwd`, `jacrev`, `vmap`, dual numbers, and any two
of them inside each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from curvescope.kernels import activations, norms
from curvescope.kernels.activations.gated import gated
from curvescope.kernels.attention.sdpa import RelativeBias
from curvescope.kernels.attention.sdpa import sdpa as _sdpa
from curvescope.kernels.backends import casting, forward_mode, transformed
from curvescope.kernels.norms.written_out import plain_layer_norm, plain_rms_norm

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

    Args:
        query: (..., H, Lq, d), with any strides.
        key: (..., H, Lk, d).
        value: (..., H, Lk, d_v).
        attn_mask: True where a query sees a key, or numbers to add to the scores; broadcast to
            (..., H, Lq, Lk). Numbers that require a gradient get one, in their own shape.
        dropout_p: Share of the weights that are set to 0; all derivatives drop the same ones.
        is_causal: Query i sees keys j ≤ i, also where Lq ≠ Lk.
        scale: 1/√d unless given.
        enable_gqa: `key` and `value` may have fewer heads, which divide H.
        score_bias: Numbers to add to the scores, beside any mask, with a gradient in their own shape. A
            `RelativeBias` needs memory linear in the length.
        window: Query i sees only keys with |i − j| < window, of those that the other arguments leave.
        key_lengths: (...,) whole numbers; keys at and after this position are not seen.
        third_order: Where the sequence is long enough for the kernels, "warn" computes derivatives of order
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
    """PyTorch's function of this name. PyTorch's own is silently wrong in reverse-over-forward mode."""
    if _plainly() or len(normalized_shape) != 1:
        return plain_layer_norm(input, normalized_shape, weight, bias, eps)
    return norms.layer_norm(input, weight, bias, eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """PyTorch's function of this name."""
    if _plainly() or len(normalized_shape) != 1:
        return plain_rms_norm(input, normalized_shape, weight, eps)
    return norms.rms_norm(input, weight, torch.finfo(input.dtype).eps if eps is None else eps)


def gelu(input: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """PyTorch's function of this name."""
    if _plainly():
        return F.gelu(input, approximate=approximate)
    return activations.gelu(input, approximate)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """PyTorch's function of this name."""
    if _plainly() or inplace:
        return F.silu(input, inplace=inplace)
    return activations.silu(input)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) ∘ up, the gated activation of LLaMA."""
    if _plainly() or gate.shape != up.shape:
        return F.silu(gate) * up
    return gated(gate, up, "silu")


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
    """PyTorch's function of this name, which has every derivative."""
    return F.cross_entropy(
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """cross_entropy(input Wᵀ + b, target), PyTorch's function of this name."""
    logits = F.linear(input, linear_weight, linear_bias)
    return F.cross_entropy(
        logits,
        target,
        weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


def _plainly() -> bool:
    """Whether plain operations have to be recorded: the kernels answer two reverse derivatives."""
    return casting() or forward_mode() or transformed() or torch.compiler.is_compiling()
