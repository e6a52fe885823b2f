"""Families that compute parts in float32 whatever their parameters are: in float64 they stay in float64."""

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
"""Functions that refuse float64 beside float32, where sums and entrywise products promote."""


class KeepDouble(TorchFunctionMode):
    """Casts of float64 tensors to float32 do nothing inside.

    That is x.float(), x.to(float32), x.type(float32) and functions with dtype=float32, such as a softmax.
    Tensors that begin in float32 (tables of rotations, positions) keep their values and are promoted where
    they meet others, in matrix products too, so what is left out is rounding alone.
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
                args = (args[0], *(_kept(value) for value in args[1:]))
            if "dtype" in options:
                options["dtype"] = _kept(options["dtype"])
        return func(*args, **options)


def _kept(value: Any) -> Any:
    """An argument of a cast, float64 where it says float32."""
    return torch.float64 if value is torch.float32 else value


def _promoted(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a product, the float32 ones in float64 when there is a float64 one."""
    given = (*args, *options.values())
    flat = [x for value in given for x in (value if isinstance(value, list) else [value])]
    dtypes = {x.dtype for x in flat if isinstance(x, Tensor)}
    if not {torch.float32, torch.float64} <= dtypes:
        return args, options

    def wide(value: Any) -> Any:
        if isinstance(value, list):  # of operands, as einsum takes them
            return [wide(x) for x in value]
        single = isinstance(value, Tensor) and value.dtype == torch.float32
        return value.double() if single else value

    return tuple(map(wide, args)), {key: wide(value) for key, value in options.items()}


def exact(dtype: torch.dtype, *, casts: bool) -> AbstractContextManager[Any]:
    """What a pass through a module runs in: `KeepDouble` in float64 where the family `casts`."""
    return KeepDouble() if casts and dtype == torch.float64 else nullcontext()
