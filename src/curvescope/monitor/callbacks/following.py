"""A monitor that follows a trainer: made when training begins, in the first process, closed at its end."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from curvescope.core.errors import UsageError
from curvescope.monitor.monitor import CurvatureMonitor


@final
class Following:
    """What the callbacks share.

    Args:
        batches: probe batches of the monitor.
        settings: its other arguments; a name it does not have is refused at once.

    Attributes:
        monitor: None before training, and in every process but the first.
    """

    def __init__(self, batches: Any, settings: Mapping[str, Any]):
        known = [name for name in signature(CurvatureMonitor).parameters if name not in ("model", "batches")]
        for name in settings:
            if name not in known:
                raise UsageError(f"unexpected setting {name!r}", hint=f"known: {', '.join(known)}")
        self.batches, self.settings = batches, dict(settings)
        self.monitor: CurvatureMonitor | None = None
        self._last: int | None = None

    def begin(self, model: nn.Module, *, first: bool) -> None:
        """Make the monitor, in the first process; what only all of them could read, all of them refuse."""
        check_whole(model)
        self._last = None
        if first:
            self.monitor = CurvatureMonitor(model, self.batches, **self.settings)

    def step(self, step: int, optimizer: Optimizer | None) -> None:
        """The trainer has taken `step` steps; a number that was told before is not heard twice."""
        if self.monitor is not None and step != self._last:
            self._last = step
            self.monitor.step(step, optimizer=None if optimizer is None else innermost(optimizer))

    def end(self) -> None:
        """Training is over."""
        if self.monitor is not None:
            self.monitor.close()


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer inside what accelerate and Lightning wrap around it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def check_whole(model: nn.Module) -> None:
    """Raise where a process holds a part of each parameter only."""
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ in ("DTensor", "FlatParameter") or hasattr(parameter, "ds_id"):
            raise UsageError(
                f"expected parameters that every process has whole, got {name}, which is spread over them",
                hint="the monitor measures in the first process alone: DistributedDataParallel suits it",
            )
