"""Reentrant checkpoints lose derivatives without an error: a pass that meets one is stopped."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from curvescope.core.errors import UsageError


class RefuseReentrant(TorchFunctionMode):
    """A forward pass inside raises where it comes to a reentrant `torch.utils.checkpoint`.

    Such a checkpoint runs its function without a graph and drops the gradient of whatever is no argument of
    it, so parameters would be missing from every derivative.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled and _in_reentrant_checkpoint():
            raise UsageError(
                "expected checkpoints that can be differentiated twice, the module uses a reentrant one",
                hint="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            )
        return func(*args, **(kwargs or {}))


def _in_reentrant_checkpoint() -> bool:
    """Whether a caller is the forward pass of torch's reentrant checkpoint."""
    code, frame = CheckpointFunction.forward.__code__, inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
