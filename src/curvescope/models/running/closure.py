"""A function of model and batch that is the loss itself, called as in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvescope.core.errors import ShapeError, UsageError
from curvescope.core.graph import leaves_of
from curvescope.kernels.norms.written_out import refuse_fused_norms, written_out_norms
from curvescope.models.running.calling import words


class Closure:
    """A call whose outputs are the loss itself: `function(module, batch)`, one number, as (1,).

    It is called with autograd on: it may take gradients of its own (a gradient penalty). Its second
    derivatives are third ones of the module then, for which torch's norms are written out.
    """

    def __init__(self, function: Callable[[nn.Module, Any], Tensor], unpack: Callable[[Any], Any]):
        self.function, self.unpack = function, unpack
        self.differentiates = False  # as far as was seen

    def __call__(self, module: nn.Module, inputs: Any, options: Mapping[str, Any]) -> Tensor:
        wanted = torch.is_grad_enabled()
        with torch.enable_grad():
            found = self._called(module, self.unpack(inputs))
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
            raise ShapeError(
                f"expected one real number in a tensor from loss_fn(model, batch), got {words(found)}",
                hint="return it without .item(), and take a mean or a sum",
            )
        if not wanted:
            return found.detach().reshape(1)
        own = {id(p) for p in module.parameters() if p.requires_grad}
        if own and all(id(leaf) not in own for leaf in leaves_of(found)):
            raise UsageError(
                "expected loss_fn(model, batch) to compute its loss with the model that it is given, no "
                "parameter of which it depends on",
                hint="no detach(), no_grad() or other copy of the model inside",
            )
        return found.reshape(1)

    def _called(self, module: nn.Module, batch: Any) -> Any:
        if not self.differentiates:
            with _Watching() as seen:
                found = self.function(module, batch)
            if not seen.gradients:
                return found
            self.differentiates = True
        with written_out_norms():
            found = self.function(module, batch)
        if isinstance(found, Tensor):
            refuse_fused_norms(found)
        return found


class _Watching(TorchFunctionMode):
    """Notices whether gradients are taken inside."""

    gradients = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gradients |= func is torch.autograd.grad
        return func(*args, **(kwargs or {}))
