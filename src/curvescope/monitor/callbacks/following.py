"""A monitor that follows a trainer: made when training begins, closed at its end.

The first process measures. A model that `fully_shard` has cut is measured by all of them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from curvescope.core.errors import UsageError, warn
from curvescope.monitor.monitor import CurvatureMonitor, check_settings
from curvescope.monitor.wrapped import check_parameters, inner_module, is_sharded


@final
class Following:
    """Makes, steps and closes a monitor for a callback.

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
        """Make the monitor, or continue with it if the same model is trained again.

        A second training that counts from 0 again is numbered on from the last step of the first; one that
        resumes from a checkpoint has the rows from there on measured again. A model that cannot be measured
        is named in a warning, and training continues without a monitor.
        """
        try:
            check_parameters(inner_module(model))
        except UsageError as error:
            if self.settings.get("raise_errors"):
                raise
            if first:
                with suppress(Warning):  # `python -W error`
                    warn(f"no curvature is measured: {error}")
            return
        if not first and not is_sharded(inner_module(model)):
            return
        if self.monitor is not None and inner_module(model) is self._module:
            self._offset = self._last if step == 0 else 0
            if step != 0:
                self._last = -1
            self.monitor.reopen()
            return
        self._module, self._last, self._offset = inner_module(model), -1, 0
        self.monitor = CurvatureMonitor(model, self.batches, **self.settings)

    def step(self, step: int, optimizer: Any, loss: Any = None) -> None:
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
        self.monitor.step(step, optimizer=own, loss=loss)

    def end(self) -> None:
        """Training is over."""
        if self.monitor is not None:
            self.monitor.close()


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer inside what accelerate and Lightning wrap around it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
