"""Fast calls of kernels, since torch's dispatch costs more than the arithmetic of a small model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
R = TypeVar("R")
PLAIN = (Tensor, nn.Parameter)
IMPORTS_DYNAMO = "torch._dynamo" in torch._ops.HigherOrderOperator.__call__.__code__.co_names
"""PyTorch 2.6 imports TorchDynamo at the first custom function in a transform, which fails without modes."""


class Function(torch.autograd.Function):
    """torch.autograd.Function with a cached signature of `forward`.

    Torch inspects the signature at every call to fill in defaults; without a cache Python builds it each
    time.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        forward: Any = cls.forward
        forward.__signature__ = inspect.signature(forward)


def hidden_from_modes(kernel: Callable[P, R]) -> Callable[P, R]:
    """Hide the operations of a kernel from function modes such as `Substitute`, which have nothing to
    replace there. Otherwise every operation would call Python once per mode. Tensor subclasses are not
    affected.
    """

    @wraps(kernel)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = (*args, *kwargs.values())
        if any(isinstance(x, Tensor) and type(x) not in PLAIN for x in arguments):
            return kernel(*args, **kwargs)
        if IMPORTS_DYNAMO and torch._C._are_functorch_transforms_active():
            import_module("torch._dynamo")
        with torch._C.DisableTorchFunction():
            return kernel(*args, **kwargs)

    return run
