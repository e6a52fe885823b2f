"""Families that compute parts in float32 whatever their parameters are: in float64 they stay in float64."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class KeepDouble(TorchFunctionMode):
    """Casts of float64 tensors to float32 do nothing inside.

    That is x.float(), x.to(float32), x.type(float32) and functions with dtype=float32, such as a softmax.
    Tensors that begin in float32 (tables of rotations) keep their values and are promoted where they meet
    others, so what is left out is rounding alone.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.float64:
            return func(*args, **options)
        if func is Tensor.float:
            return args[0]
        given = (*args[1:], *options.values())
        if func in (Tensor.to, Tensor.type) and any(value is torch.float32 for value in given):
            return args[0]
        if options.get("dtype") is torch.float32:
            options["dtype"] = torch.float64
        return func(*args, **options)


def exact(dtype: torch.dtype, *, casts: bool) -> AbstractContextManager[Any]:
    """What a pass through a module runs in: `KeepDouble` in float64 where the family `casts`."""
    return KeepDouble() if casts and dtype == torch.float64 else nullcontext()
