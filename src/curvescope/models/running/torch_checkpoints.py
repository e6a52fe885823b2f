"""Torch's own checkpoints, passed through while a pass of ours runs the module.

`torch.utils.checkpoint` computes a part of the module again in the backward pass. What stood in the module
for our forward pass (other parameters, wide weights, kernels) is out of it by then, so it would compute
something else. Inside `passing_through` a checkpoint just calls its function: that changes memory and no
number, and `checkpoint=True` is ours for the memory. `RefuseReentrant` is for copies of torch's reentrant one
that were made before: they lose derivatives without an error.
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
from curvescope.models.running.exchange import Change, exchanged

REFUSED = "the module uses torch.utils.checkpoint, which is not known in this version of torch"
_place: dict[str, Any] = torch.utils.checkpoint.__dict__
_ours: ContextVar[bool] = ContextVar("curvescope_passing_through", default=False)  # of one thread


@contextmanager
def passing_through() -> Iterator[None]:
    """Inside, checkpoints of this thread call their functions and keep what these save.

    Torch looks its helpers up in its module whenever a checkpoint is met, however that was imported. Threads
    that are in no pass of ours find them as they are. A version of torch without these helpers raises where a
    checkpoint is met.
    """
    changes = [
        Change(_place, name, _Helper(theirs.theirs if isinstance(theirs, _Helper) else theirs, ours))
        for name, ours in HELPERS.items()
        if (theirs := _place.get(name)) is not None
    ]
    token = _ours.set(True)
    try:
        with exchanged(changes), nullcontext() if LAST in _place else _refusing():
            yield
    finally:
        _ours.reset(token)


@final
class _Helper:
    """What torch calls in the place of one of its helpers: `ours` in a pass of ours, else `theirs`."""

    def __init__(self, theirs: Any, ours: Callable[..., Any]):
        self.theirs, self._function = theirs, ours

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._function if _ours.get() else self.theirs)(*args, **kwargs)

    def apply(self, *args: Any) -> Any:
        """As an autograd function is called."""
        return (self._function if _ours.get() else self.theirs.apply)(*args)


def _reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    return function(*args)


def _around(
    function: Callable[..., Any], preserve: bool = True, context_fn: Any = None, *_: Any, **__: Any
) -> Iterator[None]:
    """What torch runs before and after the function: its context for the forward pass, if there is one."""
    if context_fn is None or not torch.is_grad_enabled():
        yield
        return
    with context_fn()[0]:
        yield


def _no_hook(frame: Any) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def _refusing() -> Iterator[None]:
    """A checkpoint inside raises: it hooks into what a graph saves, and would compute with other weights."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(REFUSED):
            yield
    except RuntimeError as error:
        if str(error) != REFUSED:
            raise
        raise UsageError(REFUSED, hint="switch gradient checkpointing off, or use torch 2.13") from error


LAST = "_checkpoint_hook"  # what all checkpoints but the reentrant ones come to
HELPERS: dict[str, Callable[..., Any]] = {
    "CheckpointFunction": _reentrant,
    "_checkpoint_without_reentrant_generator": _around,
    LAST: _no_hook,
}


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
