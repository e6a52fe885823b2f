"""Passes through the user's module without backward hooks and without `torch.compile`.

A backward hook may change a gradient, which is then not a derivative of the loss; a hook that only observes
expects the gradients of training. A compiled graph has no second derivative, and TorchDynamo would trace the
patched module. `eager` switches both off and restores them afterwards.

PyTorch's own Transformer layers have a fast path without derivatives, which gives other outputs. If no
gradient is recorded, `nn.TransformerEncoder` and its layers may use it. Its outputs at padded positions are
zero or missing. Curvature is that of the path with derivatives, so values come from that path, too.
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

from curvescope.models.running.patching import Change, patched

_GLOBAL: dict[str, Any] = vars(sys.modules["torch.nn.modules.module"])
_OWN = ("_backward_hooks", "_backward_pre_hooks")
_OF_ALL = ("_global_backward_hooks", "_global_backward_pre_hooks")
_SETTING_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)

_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__


@contextmanager
def eager(module: nn.Module, *, tensor_hooks: bool = False) -> Iterator[None]:
    """Run the module without backward hooks of its parts or of tensors, and without `torch.compile`.

    Args:
        module: The module that is run inside.
        tensor_hooks: Let it set backward hooks on tensors, because no derivative is taken. Without
            gradients PyTorch refuses them, so they are always ignored there.
    """
    ignores = not torch.is_grad_enabled() or not tensor_hooks
    tensors = IgnoreTensorHooks() if ignores else nullcontext()
    with uncompiled(), patched(_without_backward_hooks(module)), tensors:
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
    """Run compiled modules and functions without their compiled graphs, which stay in torch's cache."""
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
    """A node of autograd's graph that ignores hooks."""

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
        result = func(*args, **(kwargs or {}))
        return WithoutHooks(result) if func == _GRAD_FN and result is not None else result


EDGES_OWN_THEIR_NODES = "ownership_token" in GradientEdge._fields


class OwningEdge(GradientEdge):
    """An edge that keeps its node alive, for versions of PyTorch whose own edges do not.

    There the node of a custom `autograd.Function` dies with its last output, and the edge that is left
    crashes the process. An empty tensor that is computed from the output owns the node and no numbers.
    """

    owner: Tensor


def gradient_edge(t: Tensor) -> GradientEdge:
    """Return the edge of a tensor with the node itself, inside `eager` too; it keeps the node alive."""
    with torch._C.DisableTorchFunction():
        edge = get_gradient_edge(t)
        if not EDGES_OWN_THEIR_NODES:
            edge = OwningEdge(*edge)
            with torch.enable_grad():
                edge.owner = t.reshape(-1)[:0].clone()
        return edge


@contextmanager
def without_tensor_hooks(tensors: Sequence[Tensor | GradientEdge]) -> Iterator[None]:
    """Remove the backward hooks of leaves inside, which autograd would call, and restore them."""
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
    """Mode that changes nothing: PyTorch takes no fast path while a function mode is active."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def slow_path(module: nn.Module) -> AbstractContextManager[Any]:
    """Return the context for a pass through a module: `SlowPath` if a part of it has a fast path."""
    has_fast_path = any(isinstance(part, WITH_FAST_PATH) for part in module.modules())
    return SlowPath() if has_fast_path else nullcontext()
