"""The monitor as a callback of Lightning's `Trainer`."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from curvescope.core.errors import MissingExtra, UsageError
from curvescope.core.requirements import how_to_install
from curvescope.monitor.callbacks.following import Following
from curvescope.monitor.monitor import CurvatureMonitor

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule
    from torch import nn
    from torch.optim import Optimizer


def lightning_callback(batches: Any, *, part: str = "", **settings: Any) -> Callback:
    """A callback that measures the curvature of the module that a Lightning `Trainer` trains.

        callback = cs.lightning_callback(batches, part="net", every=50, out="runs/mine")
        Trainer(max_steps=1000, callbacks=[callback]).fit(module, loader)
        callback.monitor.history

    It measures before the first step and behind the steps of the optimizer, as `trainer.global_step` counts
    them; with several optimizers nothing is said of learning rates. The first of several
    processes measures, and the others wait at their next exchange. `trainer.fit(…, ckpt_path=…)` continues in
    the same folder, and measures the steps behind the checkpoint again.

    Args:
        batches: Probe batches, as `cs.Problem` takes them.
        part: Submodule that makes the outputs, by its name; the LightningModule itself, by its `forward`, if
            empty.
        settings: As `cs.CurvatureMonitor` takes them: every, out, budget, loss, blocks, writers, …

    Returns:
        A `Callback`; its `monitor` is there once training begins.
    """

    class CurvatureCallback(_callback_class()):
        """Passes the Trainer's events on."""

        def __init__(self) -> None:
            self._following = Following(batches, settings)

        @property
        def monitor(self) -> CurvatureMonitor | None:
            """None before training, and in every process but the first."""
            return self._following.monitor

        def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
            self._following.begin(_part(pl_module, part), trainer.global_step, first=trainer.is_global_zero)
            self._following.step(trainer.global_step, _optimizer(trainer))

        def on_train_batch_end(
            self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            scalar = loss if isinstance(loss, Tensor) and loss.numel() == 1 else None
            self._following.step(trainer.global_step, _optimizer(trainer), scalar)

        def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
            self._following.end()

        def __reduce__(self) -> tuple[Any, ...]:
            return partial(lightning_callback, batches, part=part, **settings), ()

    return CurvatureCallback()


def _callback_class() -> type[Callback]:
    """Return `Callback` of the package that the process has imported; Lightning goes by two names."""
    names = sorted(["lightning.pytorch", "pytorch_lightning"], key=lambda name: name not in sys.modules)
    for name in names:
        with suppress(ImportError):
            return import_module(name).Callback
    raise MissingExtra(
        "a callback of Lightning needs the package lightning", hint=how_to_install("lightning")
    )


def _optimizer(trainer: Any) -> Optimizer | None:
    return trainer.optimizers[0] if len(trainer.optimizers) == 1 else None


def _part(module: LightningModule, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        known = ", ".join(child for child, _ in module.named_children())
        raise UsageError(
            f"expected a submodule of {type(module).__name__}, got {name!r}", hint=f"known: {known}"
        ) from None
