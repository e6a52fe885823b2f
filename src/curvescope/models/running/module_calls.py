"""Call a module, and select its outputs from what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvescope.core.errors import ShapeError, UsageError, warn
from curvescope.core.tensors import graph_leaves
from curvescope.kernels.norms.plain_norms import plain_norms, refuse_fused_norms

Call = Callable[[nn.Module, Any, Mapping[str, Any]], Any]
"""Function that calls a module on inputs, with our options."""
Output = str | int | Callable[[Any], Tensor]
"""Entry of a module's return value that is its output: a name, a position, or a function."""
LABELS = ("labels", "label", "targets", "target")
OUTPUT_NAMES = ("logits", "last_hidden_state")
SELECT_HINT = "output='name', output=1 or output=lambda returned: … selects it"


def call_module(module: nn.Module, inputs: Any, options: Mapping[str, Any]) -> Any:
    """Call the module on its single input, or on inputs by name."""
    try:
        return module(**{**options, **inputs}) if isinstance(inputs, Mapping) else module(inputs, **options)
    except TypeError as error:
        missing = [name for name in inspect.signature(module.forward).parameters if name in LABELS]
        if not missing or (isinstance(inputs, Mapping) and missing[0] in inputs):
            raise
        raise UsageError(
            f"{type(module).__name__} raised an error without its argument {missing[0]!r}: {error}",
            hint="loss='own' calls it with the whole batch and takes the loss that it returns",
        ) from error


def read_output(returned: Any, output: Output | None = None) -> Tensor:
    """Return the outputs in a module's return value.

    By default: a tensor itself; `.logits`, or `.last_hidden_state` of a body without a head; the entry of a
    dictionary with one entry; the only real tensor with axes in a tuple. A loss, class indices and lists of
    caches do not count. Two candidates are an error.
    """
    if callable(output):
        chosen = output(returned)
    elif output is not None:
        chosen = _chosen(returned, output)
    else:
        chosen = returned if isinstance(returned, Tensor) else _default_output(returned)
    if not isinstance(chosen, Tensor):
        raise ShapeError(
            "expected one tensor of outputs, or an object or a dictionary with logits, got "
            f"{_describe(returned)}",
            hint=SELECT_HINT,
        )
    return chosen


def _chosen(returned: Any, output: str | int) -> Any:
    try:
        if isinstance(output, str) and not isinstance(returned, Mapping):
            return getattr(returned, output)
        return returned[output]
    except (AttributeError, KeyError, IndexError, TypeError):
        raise UsageError(
            f"expected the outputs at {output!r} of what the module returns, got {_describe(returned)}"
        ) from None


def _default_output(returned: Any) -> Any:
    for name in OUTPUT_NAMES:
        if isinstance(returned, Mapping) and name in returned:
            return returned[name]
        if hasattr(returned, name):
            return getattr(returned, name)
    if isinstance(returned, Mapping):
        return next(iter(returned.values())) if len(returned) == 1 else None
    if not isinstance(returned, tuple | list):
        return None
    candidates = [
        i for i, x in enumerate(returned) if isinstance(x, Tensor) and x.dim() and x.is_floating_point()
    ]
    if len(candidates) != 1:
        return None
    (position,) = candidates
    if position:
        warn(
            f"the module returns {_describe(returned)}: entry {position} is used (output={position} selects "
            "it without this warning)"
        )
    return returned[position]


def own_loss(module: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a module returns: one number, an entry `loss`, or the only number in a tuple."""
    if isinstance(batch, Mapping):
        returned = module(**batch)
    else:
        returned = module(*batch) if isinstance(batch, tuple | list) else module(batch)
    if isinstance(returned, Mapping) and "loss" in returned:
        chosen = returned["loss"]
    elif isinstance(returned, tuple | list) and not hasattr(returned, "loss"):
        numbers = [x for x in returned if isinstance(x, Tensor) and x.numel() == 1]
        chosen = numbers[0] if len(numbers) == 1 else None
    else:
        chosen = getattr(returned, "loss", returned)
    if not isinstance(chosen, Tensor):
        raise UsageError(
            f"expected a model that returns its own loss, got {_describe(returned)}",
            hint="does the batch have what the loss needs, such as labels? loss_fn=f computes any loss",
        )
    return chosen


class Closure:
    """Call whose output is the loss itself: `function(module, batch)`, one number, as (1,).

    The function is called with autograd enabled, because it may take gradients itself (a gradient penalty).
    Then its second derivatives are third derivatives of the module, for which torch's norms are written out.
    """

    def __init__(self, function: Callable[[nn.Module, Any], Tensor], unpack: Callable[[Any], Any]):
        self.function, self.unpack = function, unpack
        self.differentiates = False  # set when a call takes gradients

    def __call__(self, module: nn.Module, inputs: Any, options: Mapping[str, Any]) -> Tensor:
        grad_enabled = torch.is_grad_enabled()
        with torch.enable_grad():
            returned = self._called(module, self.unpack(inputs))
        if not isinstance(returned, Tensor) or returned.numel() != 1 or not returned.is_floating_point():
            raise ShapeError(
                f"expected one real number in a tensor from loss_fn(model, batch), got {_describe(returned)}",
                hint="return it without .item(), and take a mean or a sum",
            )
        if not grad_enabled:
            return returned.detach().reshape(1)
        parameter_ids = {id(p) for p in module.parameters() if p.requires_grad}
        if parameter_ids and all(id(leaf) not in parameter_ids for leaf in graph_leaves(returned)):
            raise UsageError(
                "expected loss_fn(model, batch) to compute its loss with the model it is given, but the "
                "loss depends on no parameter of it",
                hint="no detach(), no_grad() or other copy of the model inside",
            )
        return returned.reshape(1)

    def _called(self, module: nn.Module, batch: Any) -> Any:
        if not self.differentiates:
            with _GradientDetector() as detector:
                returned = self.function(module, batch)
            if not detector.gradients:
                return returned
            self.differentiates = True
        with plain_norms():
            returned = self.function(module, batch)
        if isinstance(returned, Tensor):
            refuse_fused_norms(returned)
        return returned


class _GradientDetector(TorchFunctionMode):
    """Mode that records whether code inside takes gradients."""

    gradients = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gradients |= func is torch.autograd.grad
        return func(*args, **(kwargs or {}))


def _describe(returned: Any) -> str:
    """Describe a return value: `a dict of loss, hidden`."""
    if isinstance(returned, Mapping):
        return f"a {type(returned).__name__} of {', '.join(map(str, returned)) or 'nothing'}"
    if isinstance(returned, tuple | list):
        return f"a {type(returned).__name__} of {', '.join(map(_describe, returned)) or 'nothing'}"
    return (
        f"a tensor {tuple(returned.shape)}"
        if isinstance(returned, Tensor)
        else f"a {type(returned).__name__}"
    )
