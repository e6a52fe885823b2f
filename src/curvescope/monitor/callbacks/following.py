"""A monitor that follows a trainer: made when training begins, in the first process, closed at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from curvescope.core.errors import UsageError
from curvescope.monitor.monitor import CurvatureMonitor, check_settings
from curvescope.monitor.wrapped import inner_module


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
        check_settings(settings)
        self.batches, self.settings = batches, dict(settings)
        self.monitor: CurvatureMonitor | None = None
        self._module: Any = None
        self._last, self._offset = -1, 0

    def begin(self, model: nn.Module, step: int = 0, *, first: bool) -> None:
        """Make the monitor in the first process, or go on with it if the same model is trained again.

        A second training that counts from 0 again is numbered on from the last step of the first; one that
        resumes from a checkpoint has the rows from there on measured again. All processes refuse a model
        whose parameters are sharded.
        """
        check_whole(model)
        if not first:
            return
        if self.monitor is not None and inner_module(model) is self._module:
            self._offset = self._last if step == 0 else 0
            if step != 0:
                self._last = -1
            self.monitor.reopen()
            return
        self._module, self._last, self._offset = inner_module(model), -1, 0
        self.monitor = CurvatureMonitor(model, self.batches, **self.settings)

    def step(self, step: int, optimizer: Any) -> None:
        """Pass on that the trainer has taken `step` steps; a step that was passed on before is ignored."""
        step += self._offset
        if self.monitor is None or step == self._last:
            return
        self._last = step
        try:
            own = None if optimizer is None else innermost(optimizer)
        except Exception as error:
            if self.settings.get("raise_errors"):
                raise
            own = None
            self.monitor.note_failure("the optimizer", error, step)
        self.monitor.step(step, optimizer=own)

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
