"""Passes through the user's module without what PyTorch adds around it: backward hooks and `torch.compile`.

A backward hook may change a gradient, which is then no derivative of the loss, and one that only observes
expects the gradients of training. A compiled graph has no second derivative, and TorchDynamo would trace what
stands in the module during a product. Inside `eager` neither takes part; both are as they were afterwards.

PyTorch's own Transformer layers have a fast path: it has no derivatives, and it gives something else.

Where no gradient is recorded, `nn.TransformerEncoder` and its layers may take a fused path. Its outputs at
padded positions are zeros, or missing, where the path with derivatives has numbers. Curvature is that of the
path with derivatives, so values are taken from it too.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from curvescope.models.running.exchange import Change, exchanged

_GLOBAL: dict[str, Any] = vars(sys.modules["torch.nn.modules.module"])
_OWN = ("_backward_hooks", "_backward_pre_hooks")
_OF_ALL = ("_global_backward_hooks", "_global_backward_pre_hooks")
_SETTING_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)

_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__


@contextmanager
def eager(module: nn.Module, *, tensor_hooks: bool = False) -> Iterator[None]:
    """Run the module without backward hooks of its parts or of tensors, and without `torch.compile`.

    Args:
        module: The module that is run inside.
        tensor_hooks: Let it set backward hooks on tensors, because no derivative is taken.
    """
    ignores = torch.is_grad_enabled() and not tensor_hooks
    tensors = IgnoreTensorHooks() if ignores else nullcontext()
    with uncompiled(), exchanged(_without_backward_hooks(module)), tensors:
        yield


@contextmanager
def differentiating() -> Iterator[None]:
    """Ignore the caller's modes inside: no_grad, inference mode, autocast, `torch.compile`."""
    with uncompiled(), torch.inference_mode(False), torch.enable_grad(), ExitStack() as off:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                off.enter_context(torch.autocast(kind, enabled=False))
        yield


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled modules and functions as they are written. Compiled graphs stay in torch's cache."""
    loaded = "torch._dynamo" in sys.modules  # otherwise nothing was compiled, and the import takes seconds
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


def original(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wraps, or the module itself."""
    while type(module).__name__ == "OptimizedModule" and isinstance(
        module._modules.get("_orig_mod"), nn.Module
    ):
        module = module._modules["_orig_mod"]  # pyright: ignore[reportAssignmentType]
    return module


def _without_backward_hooks(module: nn.Module) -> list[Change]:
    holders = [(vars(part), name) for part in module.modules() for name in _OWN]
    holders += [(_GLOBAL, name) for name in _OF_ALL]
    return [Change(holder, name, OrderedDict()) for holder, name in holders if holder.get(name)]


class WithoutHooks:
    """A node of autograd's graph as the user's code sees it, except that it takes no hooks."""

    def __init__(self, node: Any):
        self._node = node

    def register_hook(self, hook: Any) -> RemovableHandle:
        """Ignore a hook; the handle removes nothing."""
        return RemovableHandle(OrderedDict())

    register_prehook = register_hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


class IgnoreTensorHooks(TorchFunctionMode):
    """Ignore backward hooks that code inside sets on tensors and on their `grad_fn`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _SETTING_HOOKS:
            return RemovableHandle(OrderedDict())
        found = func(*args, **(kwargs or {}))
        return WithoutHooks(found) if func == _GRAD_FN and found is not None else found


def gradient_edge(t: Tensor) -> GradientEdge:
    """Return the edge of a tensor with the node itself, inside `eager` too."""
    with torch._C.DisableTorchFunction():
        return get_gradient_edge(t)


@contextmanager
def without_tensor_hooks(tensors: Sequence[Tensor | GradientEdge]) -> Iterator[None]:
    """Take the backward hooks off leaves, which autograd calls for a derivative, and put them back."""
    hooked = [(t, t._backward_hooks) for t in tensors if isinstance(t, Tensor) and t._backward_hooks]
    try:
        for t, _ in hooked:
            t._backward_hooks = None
        yield
    finally:
        for t, hooks in hooked:
            t._backward_hooks = hooks


WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class SlowPath(TorchFunctionMode):
    """Changes nothing; PyTorch takes no fast path while somebody looks at its functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def slow_path(module: nn.Module) -> AbstractContextManager[Any]:
    """What a pass through a module runs in: `SlowPath` where a part of it has a fast one."""
    found = any(isinstance(part, WITH_FAST_PATH) for part in module.modules())
    return SlowPath() if found else nullcontext()
