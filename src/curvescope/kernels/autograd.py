"""A Function of autograd that is called quickly."""

from __future__ import annotations

import inspect
from typing import Any

import torch


class Function(torch.autograd.Function):
    """Torch's own, whose `forward` has its signature at hand.

    Torch asks Python for the signature at every call, in order to fill in defaults: without one at hand it is
    put together anew each time, which takes longer than the arithmetic of a small model.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        forward: Any = cls.forward
        forward.__signature__ = inspect.signature(forward)
