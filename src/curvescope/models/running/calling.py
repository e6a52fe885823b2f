"""How a module is called, and which part of what it returns are its outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from curvescope.core.errors import ShapeError, UsageError, warn
from curvescope.core.tensors import leaves_of
from curvescope.kernels.norms.written_out import refuse_fused_norms, written_out_norms

Call = Callable[[nn.Module, Any, Mapping[str, Any]], Any]
"""What a module returns on inputs, with options of ours."""
Output = str | int | Callable[[Any], Tensor]
"""Which entry of what a module returns its outputs are: by name, by position, or read by a function."""
LABELS = ("labels", "label", "targets", "target")
KNOWN = ("logits", "last_hidden_state")
CHOOSE = "output='name', output=1 or output=lambda found: … says which it is"


def call_module(module: nn.Module, inputs: Any, options: Mapping[str, Any]) -> Any:
    """The module on its one input, or on inputs by name."""
    try:
        return module(**{**options, **inputs}) if isinstance(inputs, Mapping) else module(inputs, **options)
    except TypeError as error:
        wanted = [name for name in inspect.signature(module.forward).parameters if name in LABELS]
        if not wanted or (isinstance(inputs, Mapping) and wanted[0] in inputs):
            raise
        raise UsageError(
            f"{type(module).__name__} raised an error without its argument {wanted[0]!r}: {error}",
            hint="loss='own' calls it with the whole batch and takes the loss that it returns",
        ) from error


def read_output(found: Any, output: Output | None = None) -> Tensor:
    """The outputs among what a module returned.

    Without a choice: a tensor itself; `.logits`, or `.last_hidden_state` of a body without a head; the entry
    of a dictionary that has one; in a tuple the only real tensor with axes, wherever it stands. A loss, class
    indices and lists of caches beside it do not count. Two such tensors are refused.
    """
    if callable(output):
        chosen = output(found)
    elif output is not None:
        chosen = _chosen(found, output)
    else:
        chosen = found if isinstance(found, Tensor) else _usual(found)
    if not isinstance(chosen, Tensor):
        raise ShapeError(
            f"expected one tensor of outputs, or an object or a dictionary with logits, got {_words(found)}",
            hint=CHOOSE,
        )
    return chosen


def _chosen(found: Any, output: str | int) -> Any:
    try:
        if isinstance(output, str) and not isinstance(found, Mapping):
            return getattr(found, output)
        return found[output]
    except (AttributeError, KeyError, IndexError, TypeError):
        raise UsageError(
            f"expected the outputs at {output!r} of what the module returns, got {_words(found)}"
        ) from None


def _usual(found: Any) -> Any:
    for name in KNOWN:
        if isinstance(found, Mapping) and name in found:
            return found[name]
        if hasattr(found, name):
            return getattr(found, name)
    if isinstance(found, Mapping):
        return next(iter(found.values())) if len(found) == 1 else None
    if not isinstance(found, tuple | list):
        return None
    able = [i for i, x in enumerate(found) if isinstance(x, Tensor) and x.dim() and x.is_floating_point()]
    if len(able) != 1:
        return None
    if able[0]:
        warn(f"the module returns {_words(found)}: entry {able[0]} is taken (output={able[0]} says so)")
    return found[able[0]]


def own_loss(module: nn.Module, batch: Any) -> Tensor:
    """The loss that a module returns itself: one number, an entry `loss`, or the one number in a tuple."""
    if isinstance(batch, Mapping):
        found = module(**batch)
    else:
        found = module(*batch) if isinstance(batch, tuple | list) else module(batch)
    if isinstance(found, Mapping) and "loss" in found:
        chosen = found["loss"]
    elif isinstance(found, tuple | list) and not hasattr(found, "loss"):
        numbers = [x for x in found if isinstance(x, Tensor) and x.numel() == 1]
        chosen = numbers[0] if len(numbers) == 1 else None
    else:
        chosen = getattr(found, "loss", found)
    if not isinstance(chosen, Tensor):
        raise UsageError(
            f"expected a model that returns its own loss, got {_words(found)}",
            hint="does the batch hold what the loss needs, such as labels? loss_fn=f computes any loss",
        )
    return chosen


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
                f"expected one real number in a tensor from loss_fn(model, batch), got {_words(found)}",
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


def _words(found: Any) -> str:
    """`a dict of loss, hidden`."""
    if isinstance(found, Mapping):
        return f"a {type(found).__name__} of {', '.join(map(str, found)) or 'nothing'}"
    if isinstance(found, tuple | list):
        return f"a {type(found).__name__} of {', '.join(map(_words, found)) or 'nothing'}"
    return f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
