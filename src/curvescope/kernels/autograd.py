"""What makes a kernel quick to call: torch's own ways cost more than the arithmetic of a small model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
R = TypeVar("R")
PLAIN = (Tensor, nn.Parameter)


class Function(torch.autograd.Function):
    """Torch's own, whose `forward` has its signature at hand.

    Torch asks Python for the signature at every call, in order to fill in defaults; without one at hand it is
    put together anew each time.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        forward: Any = cls.forward
        forward.__signature__ = inspect.signature(forward)


def unseen(kernel: Callable[P, R]) -> Callable[P, R]:
    """The kernel, whose operations modes such as `Substitute` do not see: none of them is theirs to change.

    Every operation would be a call of Python for each mode. Tensors of other classes keep their ways.
    """

    @wraps(kernel)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        given = (*args, *kwargs.values())
        if any(isinstance(x, Tensor) and type(x) not in PLAIN for x in given):
            return kernel(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return kernel(*args, **kwargs)

    return run
