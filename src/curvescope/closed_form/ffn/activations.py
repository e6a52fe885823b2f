"""Activations with their first two derivatives, elementwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from curvescope.core.errors import UsageError, near_misses

ActivationName = Literal["relu", "gelu", "gelu_tanh", "silu", "identity", "swiglu", "geglu"]


@dataclass(frozen=True)
class Activation:
    """a, a′ and a″ of one activation, and whether it gates: z = a(x W_g) ∘ (x W_u) instead of a(x W_1)."""

    name: str
    value: Callable[[Tensor], Tensor]
    first: Callable[[Tensor], Tensor]
    second: Callable[[Tensor], Tensor]
    gated: bool = False


def activation(name: str) -> Activation:
    """An activation by name; `swiglu` and `geglu` are silu and gelu with a gate."""
    if name not in _KNOWN:
        raise UsageError(f"expected an activation, got {name!r}", hint=near_misses(name, list(_KNOWN)))
    return _KNOWN[name]


def _relu_slope(h: Tensor) -> Tensor:
    """1 where h > 0; 0 at the kink, where ReLU has no derivative."""
    return (h > 0).to(h.dtype)


def _gelu(h: Tensor) -> Tensor:
    """h Φ(h)."""
    return h * _normal_cdf(h)


def _gelu_first(h: Tensor) -> Tensor:
    """Φ + h φ."""
    return _normal_cdf(h) + h * _normal_pdf(h)


def _gelu_second(h: Tensor) -> Tensor:
    """φ (2 − h²)."""
    return _normal_pdf(h) * (2 - h * h)


_K, _C = math.sqrt(2 / math.pi), 0.044715


def _tanh_parts(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """t = tanh u, u′ and u″ of u = k(h + c h³), k = √(2/π), c = 0.044715."""
    return torch.tanh(_K * (h + _C * h**3)), _K * (1 + 3 * _C * h * h), 6 * _K * _C * h


def _gelu_tanh(h: Tensor) -> Tensor:
    """h (1 + t)/2."""
    return h * (1 + _tanh_parts(h)[0]) / 2


def _gelu_tanh_first(h: Tensor) -> Tensor:
    """(1 + t)/2 + h (1 − t²) u′/2."""
    t, du, _ = _tanh_parts(h)
    return (1 + t) / 2 + h * (1 - t * t) * du / 2


def _gelu_tanh_second(h: Tensor) -> Tensor:
    """(1 − t²) u′ + h (1 − t²)(u″ − 2 t u′²)/2."""
    t, du, ddu = _tanh_parts(h)
    return (1 - t * t) * (du + h * (ddu - 2 * t * du * du) / 2)


def _silu_first(h: Tensor) -> Tensor:
    """ς + h ς(1 − ς)."""
    s = torch.sigmoid(h)
    return s + h * s * (1 - s)


def _silu_second(h: Tensor) -> Tensor:
    """ς(1 − ς)(2 + h(1 − 2ς))."""
    s = torch.sigmoid(h)
    return s * (1 - s) * (2 + h * (1 - 2 * s))


def _normal_pdf(h: Tensor) -> Tensor:
    return torch.exp(-h * h / 2) / math.sqrt(2 * math.pi)


def _normal_cdf(h: Tensor) -> Tensor:
    return torch.special.ndtr(h)


_SILU = (lambda h: h * torch.sigmoid(h), _silu_first, _silu_second)
_GELU = (_gelu, _gelu_first, _gelu_second)
_KNOWN = {
    "relu": Activation("relu", torch.relu, _relu_slope, torch.zeros_like),
    "gelu": Activation("gelu", *_GELU),
    "gelu_tanh": Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_first, _gelu_tanh_second),
    "silu": Activation("silu", *_SILU),
    "identity": Activation("identity", lambda h: h, torch.ones_like, torch.zeros_like),
    "swiglu": Activation("swiglu", *_SILU, gated=True),
    "geglu": Activation("geglu", *_GELU, gated=True),
}
