"""The monitor as a callback of Hugging Face's `Trainer`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from curvescope.core.errors import MissingExtra
from curvescope.core.requirements import how_to_install
from curvescope.monitor.callbacks.following import Following
from curvescope.monitor.monitor import CurvatureMonitor

if TYPE_CHECKING:
    from transformers import TrainerCallback


def trainer_callback(batches: Any, **settings: Any) -> TrainerCallback:
    """A callback that measures the curvature of the model that a `transformers.Trainer` trains.

        callback = cs.trainer_callback(batches, every=50, out="runs/mine")
        Trainer(model, arguments, train_dataset=dataset, callbacks=[callback]).train()
        callback.monitor.history

    It measures before the first step and behind the Trainer's steps, as they are numbered there, with the
    Trainer's optimizer and the learning rate of the next step. The first of several processes
    measures, and the others wait at their next exchange. `trainer.train(resume_from_checkpoint=True)`
    continues in the same folder, and measures the steps behind the checkpoint again.

    Args:
        batches: Probe batches, as `cs.Problem` takes them.
        settings: As `cs.CurvatureMonitor` takes them: every, out, budget, loss, blocks, writers, …

    Returns:
        A `TrainerCallback`; its `monitor` is there once training begins.
    """
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise MissingExtra(
            "a callback of the Trainer needs the package transformers", hint=how_to_install("transformers")
        ) from None

    class CurvatureCallback(TrainerCallback):
        """Passes the Trainer's events on."""

        def __init__(self) -> None:
            self._following = Following(batches, settings)

        @property
        def monitor(self) -> CurvatureMonitor | None:
            """None before training, and in every process but the first."""
            return self._following.monitor

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self._following.begin(given["model"], state.global_step, first=state.is_world_process_zero)
            self._following.step(state.global_step, given["optimizer"])

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self._following.step(state.global_step, given["optimizer"])

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self._following.end()

        def __reduce__(self) -> tuple[Any, ...]:
            return partial(trainer_callback, batches, **settings), ()

    return CurvatureCallback()
