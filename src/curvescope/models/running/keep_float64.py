"""Keep float64 in families of models that always cast some parts to float32."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NAMES = ("matmul", "mm", "bmm", "mv", "dot", "addmm", "addmv", "addbmm", "baddbmm")
PRODUCTS = frozenset(
    {
        *(getattr(kind, name) for kind in (torch, Tensor) for name in _NAMES),
        *(Tensor.__matmul__, Tensor.__rmatmul__, torch.einsum, torch.tensordot),
        *(F.linear, F.scaled_dot_product_attention),
    }
)
"""Functions that raise for mixed float64 and float32 instead of promoting."""


class KeepDouble(TorchFunctionMode):
    """Mode in which casts of float64 tensors to float32 do nothing.

    These are x.float(), x.to(float32), x.type(float32) and functions with dtype=float32, such as a softmax.
    Tensors that are float32 from the start (rotary tables, positions) keep their values and are promoted in
    operations with float64, also in matrix products. So only rounding is avoided.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in PRODUCTS:
            args, options = _promoted(args, options)
        elif args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in (Tensor.to, Tensor.type):
                args = (args[0], *(_as_float64(value) for value in args[1:]))
            if "dtype" in options:
                options["dtype"] = _as_float64(options["dtype"])
        return func(*args, **options)


def _as_float64(value: Any) -> Any:
    """Return an argument of a cast, with float64 instead of float32."""
    return torch.float64 if value is torch.float32 else value


def _promoted(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a product, all in float64 if one is."""
    given = (*args, *options.values())
    flat = [x for value in given for x in (value if isinstance(value, list) else [value])]
    dtypes = {x.dtype for x in flat if isinstance(x, Tensor)}
    if not {torch.float32, torch.float64} <= dtypes:
        return args, options

    def wide(value: Any) -> Any:
        if isinstance(value, list):  # a list of operands, as in einsum
            return [wide(x) for x in value]
        single = isinstance(value, Tensor) and value.dtype == torch.float32
        return value.double() if single else value

    return tuple(map(wide, args)), {key: wide(value) for key, value in options.items()}


def exact(dtype: torch.dtype, *, casts: bool) -> AbstractContextManager[Any]:
    """Return the context for a pass through a module: `KeepDouble` in float64 if the family `casts`."""
    return KeepDouble() if casts and dtype == torch.float64 else nullcontext()
