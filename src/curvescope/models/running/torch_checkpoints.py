"""Switch torch's own checkpoints off while we run the module.

`torch.utils.checkpoint` recomputes a part of the module in the backward pass. By then our patches (other
parameters, float32 weights, kernels) are undone, so it would compute something else. Inside `passing_through`
a checkpoint only calls its function: results are the same, with more memory; `checkpoint=True` is our way to
save memory. `RefuseReentrant` catches copies of torch's reentrant checkpoint that were imported earlier: they
lose derivatives without an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, final

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from curvescope.core.errors import UsageError
from curvescope.models.running.patching import Change, patched

UNSUPPORTED_CHECKPOINT = (
    "the module uses torch.utils.checkpoint, which this package does not support in this version of torch"
)
_checkpoint_module: dict[str, Any] = torch.utils.checkpoint.__dict__
_in_our_pass: ContextVar[bool] = ContextVar(
    "curvescope_passing_through", default=False
)  # one value per thread


@contextmanager
def passing_through() -> Iterator[None]:
    """Let checkpoints of this thread call their functions without recomputing them.

    Torch looks up the helpers in its module at every checkpoint. Other threads use the original helpers. If a
    version of torch lacks these helpers, a checkpoint raises.
    """
    changes = [
        Change(
            _checkpoint_module,
            name,
            _Helper(original.original if isinstance(original, _Helper) else original, replacement),
        )
        for name, replacement in HELPERS.items()
        if (original := _checkpoint_module.get(name)) is not None
    ]
    token = _in_our_pass.set(True)
    try:
        with patched(changes), nullcontext() if LAST in _checkpoint_module else _refusing():
            yield
    finally:
        _in_our_pass.reset(token)


@final
class _Helper:
    """Replacement of a helper of torch: `replacement` in our own passes, else `original`."""

    def __init__(self, original: Any, replacement: Callable[..., Any]):
        self.original, self._function = original, replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._function if _in_our_pass.get() else self.original)(*args, **kwargs)

    def apply(self, *args: Any) -> Any:
        """Call the helper like an autograd function."""
        return (self._function if _in_our_pass.get() else self.original.apply)(*args)


def _reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return function(*args)


def _with_context(
    function: Callable[..., Any], preserve: bool = True, context_fn: Any = None, *_: Any, **__: Any
) -> Iterator[None]:
    """Run torch's context around the function in the forward pass, if it has one."""
    if context_fn is None or not torch.is_grad_enabled():
        yield
        return
    with context_fn()[0]:
        yield


def _no_hook(frame: Any) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def _refusing() -> Iterator[None]:
    """Make checkpoints inside raise, because they would recompute with other weights."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(UNSUPPORTED_CHECKPOINT):
            yield
    except RuntimeError as error:
        if str(error) != UNSUPPORTED_CHECKPOINT:
            raise
        raise UsageError(
            UNSUPPORTED_CHECKPOINT, hint="switch gradient checkpointing off, or use torch 2.13"
        ) from error


LAST = "_checkpoint_hook"  # helper that all non-reentrant checkpoints use
HELPERS: dict[str, Callable[..., Any]] = {
    "CheckpointFunction": _reentrant,
    "_checkpoint_without_reentrant_generator": _with_context,
    LAST: _no_hook,
}


class RefuseReentrant(TorchFunctionMode):
    """Raise if a forward pass inside uses a reentrant `torch.utils.checkpoint`.

    Such a checkpoint runs its function without a graph and drops the gradient of everything that is not an
    argument, so parameters would be missing in all derivatives.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled and _in_reentrant_checkpoint():
            raise UsageError(
                "expected checkpoints that can be differentiated twice, but the module uses a reentrant one",
                hint="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
            )
        return func(*args, **(kwargs or {}))


def _in_reentrant_checkpoint() -> bool:
    """Return True if a caller is the forward pass of torch's reentrant checkpoint."""
    code, frame = CheckpointFunction.forward.__code__, inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
