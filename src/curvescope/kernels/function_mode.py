"""Function mode that replaces PyTorch's functions by kernels with equal values and fast second derivatives.

It works for any module, because it intercepts function calls, independent of classes. Calls without a
counterpart (another axis, a mask, dropout, …) are passed on unchanged, and so is everything under autocast.
The arguments of rules have PyTorch's names, because callers may use them as keywords.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from curvescope.kernels import activations, norms
from curvescope.kernels.attention import attention
from curvescope.kernels.attention.multihead import multihead
from curvescope.kernels.backends import casting
from curvescope.kernels.head import LinearHead
from curvescope.kernels.linear import is_of_leaf, linear
from curvescope.kernels.norms.plain_norms import default_eps

_alone = RLock()
LINEAR_ON = ("cuda",)  # devices with our linear maps; on a CPU the calls cost as much as they save


class Substitute(TorchFunctionMode):
    """Replaces norms, activations and attention; can skip one linear map.

    Args:
        second_order: False if only first derivatives, and J v through Jᵀu, are needed.
        head: Index of the linear map to skip: its result is a `placeholder` without numbers, and `head` has
            its factors. None skips nothing.
    """

    def __init__(self, *, second_order: bool = True, head: int | None = None):
        super().__init__()
        self.second_order = second_order
        self.placeholder: Tensor | None = None
        self.head: LinearHead | None = None
        self._undone, self._linear_maps, self._graph = head, 0, torch.is_grad_enabled()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LINEAR_MAPS:
            factors = _factors(func, args, kwargs)
            if factors is not None:
                self._linear_maps += 1
                recorded = (
                    torch.is_grad_enabled() == self._graph
                )  # otherwise the call is inside a recomputed layer
                if self._linear_maps - 1 == self._undone and recorded:
                    self.head = factors
                    self.placeholder = factors.h.new_zeros(1).expand(factors.shape)
                    return self.placeholder
                if factors.h.device.type in LINEAR_ON:
                    return self._linear(factors)
        elif func in RULES and not casting():
            result = RULES[func](self.second_order, *args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)

    def _linear(self, factors: LinearHead) -> Tensor:
        """Compute the linear map by our kernel, without values for derivatives that only reach a leaf."""
        h, W, b = factors
        numbers = not (is_of_leaf(W) and (b is None or is_of_leaf(b)))
        return linear(h, W, b, second_order=self.second_order, numbers=numbers)


class PlainAttention(TorchFunctionMode):
    """Use the plain form of PyTorch's attention, which can be differentiated twice, inside the context.

    `torch.nn.attention.sdpa_kernel` does the same for the whole process, other threads included; it is used
    only if attention is called inside one of PyTorch's own functions, one thread at a time.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _plain_attention(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            with _alone, sdpa_kernel(SDPBackend.MATH):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class HeadLocation(NamedTuple):
    """Linear map that made the outputs: its count, and the axis of its results in them, -1 or 1."""

    number: int
    axis: int

    def made(self, z: Tensor, result: Tensor) -> bool:
        """Return True if z is the result, or for axis 1 a view of it with the last axis moved there."""
        if self.axis == -1:
            return z is result
        view = result.movedim(-1, 1)
        base = result if result._base is None else result._base
        same_layout = z.shape == view.shape and z.stride() == view.stride()
        return same_layout and z._base is base and z.storage_offset() == view.storage_offset()


class FindHead(TorchFunctionMode):
    """Record linear maps: `place(z)` returns the one that computed z, for `Substitute`."""

    def __init__(self) -> None:
        super().__init__()
        self._results: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in LINEAR_MAPS and _factors(func, args, kwargs or {}) is not None:
            self._results.append((found, found._version))
        return found

    def place(self, z: Tensor) -> HeadLocation | None:
        """Return the linear map with the result z (or with z as a view on axis 1); None if there is none, or
        if z was modified.
        """
        for i, (result, version) in enumerate(self._results):
            for head in (HeadLocation(i, -1), HeadLocation(i, 1)):
                if version == z._version and (head.axis == -1 or z.dim() > 2) and head.made(z, result):
                    return head
        return None


# ------------------------------------------------------ linear maps as (h, W, b); None for other operations


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> LinearHead | None:
    plain = weight.dim() == 2 and (bias is None or bias.dim() == 1)
    return LinearHead(input, weight, bias) if plain else None


def _matmul(input: Tensor, other: Tensor) -> LinearHead | None:
    return LinearHead(input, other.T, None) if other.dim() == 2 and input.dim() >= 2 else None


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> LinearHead | None:
    plain = beta == 1 and alpha == 1 and input.shape == mat2.shape[1:]
    return LinearHead(mat1, mat2.T, input) if plain else None


def _factors(func: Any, args: Any, kwargs: Any) -> LinearHead | None:
    """Return the factors of a real linear map by the function's rule; None if it must be computed."""
    factors = None if casting() or "out" in kwargs else LINEAR_MAPS[func](*args, **kwargs)
    return None if factors is None or any(t is not None and t.is_complex() for t in factors) else factors


LINEAR_MAPS: dict[Callable[..., Any], Callable[..., LinearHead | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
}


# ---------------------------------------------- rules: the kernel's result, or None to use PyTorch's own


def _layer_norm(
    second_order: bool,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if len(normalized_shape) != 1:
        return None
    return norms.layer_norm(input, weight, bias, eps, second_order=second_order)


def _rms_norm(
    second_order: bool,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    if len(normalized_shape) != 1:
        return None
    eps = default_eps(input) if eps is None else eps
    return norms.rms_norm(input, weight, eps, second_order=second_order)


def _gelu(second_order: bool, input: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    return activations.gelu(input, approximate, second_order=second_order)


def _silu(second_order: bool, input: Tensor, inplace: bool = False) -> Tensor | None:
    return None if inplace else activations.silu(input, second_order=second_order)


def _attention(
    second_order: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if attn_mask is not None or dropout_p or not query.dim() == key.dim() == value.dim() == 4:
        return None
    one_batch = query.shape[0] == key.shape[0] and key.shape[:3] == value.shape[:3]
    heads = query.shape[1] == key.shape[1] or enable_gqa
    if not (one_batch and heads) or (is_causal and query.shape[2] != key.shape[2]):
        return None
    return attention(query, key, value, causal=is_causal, scale=scale, second_order=second_order)


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the plain form only adds
        attn_mask = query.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)
    arguments = query, key, value, attn_mask, dropout_p, is_causal
    return torch._scaled_dot_product_attention_math(*arguments, scale=scale, enable_gqa=enable_gqa)[0]  # pyright: ignore


RULES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.gelu: _gelu,
    F.silu: _silu,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: multihead,
}
