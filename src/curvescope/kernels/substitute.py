"""Inside this mode, PyTorch's functions are ours: the same values, with fast second derivatives.

It works on any module, because it looks at function calls, not at classes. What has no counterpart here
(another axis, a mask, dropout, …) goes through as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvescope.kernels import activations, norms
from curvescope.kernels.attention import attention
from curvescope.kernels.head import LinearHead


class Substitute(TorchFunctionMode):
    """Replaces norms, activations and attention; can leave one linear map undone.

    Args:
        second_order: False where only first derivatives, and J v through Jᵀu, will be asked for.
        head: which linear map (counted from 0) is left undone: its result is a `placeholder` without
            numbers, and `head` its factors. None leaves all as they are.
    """

    def __init__(self, *, second_order: bool = True, head: int | None = None):
        super().__init__()
        self.second_order = second_order
        self.placeholder: Tensor | None = None
        self.head: LinearHead | None = None
        self._undone, self._linear_maps = head, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LINEAR_MAPS:
            factors = LINEAR_MAPS[func](*args, **kwargs)
            if factors is not None:
                self._linear_maps += 1
                if self._linear_maps - 1 == self._undone:
                    self.head = factors
                    self.placeholder = factors.h.new_empty(1).expand(factors.shape)
                    return self.placeholder
        elif func in RULES:
            found = RULES[func](self.second_order, *args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


class FindHead(TorchFunctionMode):
    """Notices which linear map made a tensor: `place(z)` is its count, to be given to `Substitute`."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in LINEAR_MAPS and LINEAR_MAPS[func](*args, **(kwargs or {})) is not None:
            self._made.append(found)
        return found

    def place(self, z: Tensor) -> int | None:
        """The count of the linear map whose result is z itself; None where it was worked on since."""
        return next((i for i, made in enumerate(self._made) if made is z), None)


# --------------------------------------------------------------- linear maps as (h, W, b), None: another kind


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> LinearHead | None:
    return LinearHead(x, weight, bias) if weight.dim() == 2 else None


def _matmul(x: Tensor, other: Tensor) -> LinearHead | None:
    return LinearHead(x, other.T, None) if other.dim() == 2 and x.dim() >= 2 else None


def _addmm(b: Tensor, x: Tensor, W: Tensor, *, beta: float = 1, alpha: float = 1) -> LinearHead | None:
    return LinearHead(x, W.T, b) if beta == 1 and alpha == 1 and b.dim() == 1 else None


LINEAR_MAPS: dict[Callable[..., Any], Callable[..., LinearHead | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
}


# ----------------------------------------------------------------------- rules: our result, None: not for us


def _layer_norm(
    second_order: bool,
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if len(normalized_shape) != 1:
        return None
    return norms.layer_norm(x, weight, bias, eps, second_order=second_order)


def _rms_norm(
    second_order: bool,
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    if len(normalized_shape) != 1:
        return None
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return norms.rms_norm(x, weight, eps, second_order=second_order)


def _gelu(second_order: bool, x: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    return activations.gelu(x, approximate, second_order=second_order)


def _silu(second_order: bool, x: Tensor, inplace: bool = False) -> Tensor | None:
    return None if inplace else activations.silu(x, second_order=second_order)


def _attention(
    second_order: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    grouped = q.dim() == 4 and q.shape[1] != k.shape[1]
    square = q.shape[-2] == k.shape[-2]
    if q.dim() != 4 or dropout_p or (grouped and not enable_gqa) or (is_causal and not square):
        return None
    if attn_mask is None:
        return attention(q, k, v, causal=is_causal, scale=scale, second_order=second_order)
    return _masked(q, k, v, attn_mask, scale)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Plain attention with any mask: PyTorch's own has no second derivative."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    return (scores + mask).softmax(-1) @ v


RULES: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.gelu: _gelu,
    F.silu: _silu,
    F.scaled_dot_product_attention: _attention,
}
