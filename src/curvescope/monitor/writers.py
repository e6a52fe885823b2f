"""Writers of a monitor's numbers besides its folder: TensorBoard, Weights & Biases, objects of your own.

A writer is chosen by name, `writers=("tensorboard", "wandb")`, or is any object with `write` and `close`. A
number is written under `curvature/`, one that was not measured (nan) is left out. Writers never stop a
training run: one that fails is named in a warning and not asked again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

from curvescope.core.errors import MissingExtra, UsageError, near_misses, warn
from curvescope.core.requirements import how_to_install

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter
    from wandb.sdk.wandb_run import Run

PREFIX = "curvature"


@runtime_checkable
class Writer(Protocol):
    """Takes the numbers of a measurement."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Keep the numbers that were measured behind training step `step`."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


@final
class TensorBoard:
    """Scalars for TensorBoard.

    Args:
        place: a folder, made at the first number, or a `SummaryWriter` of your own, which stays open.
    """

    def __init__(self, place: str | Path | SummaryWriter):
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise MissingExtra(
                "the writer 'tensorboard' needs the package tensorboard", hint=how_to_install("tensorboard")
            ) from None
        self._given = isinstance(place, SummaryWriter)
        self._writer = place if isinstance(place, SummaryWriter) else None
        self._open: Callable[[int], SummaryWriter] = lambda step: SummaryWriter(str(place), purge_step=step)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._open(step)  # what a killed run wrote behind this step is hidden
        for name, value in _measured(numbers).items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None and not self._given:
            self._writer.close()


@final
class WandB:
    """A run of Weights & Biases: the one that is active at the first number, or else one of its own.

    Numbers have an axis of their own, `curvature/step`, and in a run that is not ours they join the row that
    is being filled: whichever way the training loop counts its rows, it continues to count so.

    Args:
        folder: where a run of our own keeps its files, from which it resumes after the process was killed.
        run: the run to write to, whatever is active.
    """

    def __init__(self, folder: Path | None = None, *, run: Run | None = None):
        try:
            import wandb
        except ImportError:
            raise MissingExtra(
                "the writer 'wandb' needs the package wandb", hint=how_to_install("wandb")
            ) from None
        self._wandb, self._folder, self._run = wandb, folder, run
        self._own = self._begun = False
        self._row: int | None = None  # the row of another's run that holds numbers of ours

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        run = self._begin()
        if not self._own and run.step == self._row:
            run.log({})  # nobody filled that row further: it is complete
        run.log({f"{PREFIX}/step": step, **_measured(numbers)}, commit=self._own)
        self._row = run.step

    def close(self) -> None:
        if self._run is not None and self._own:
            self._run.finish()

    def _begin(self) -> Run:
        run = self._run or self._wandb.run
        if run is None:
            run, self._own = self._start(), True
        if not self._begun:
            run.define_metric(f"{PREFIX}/step", hidden=True)
            run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")
        self._run, self._begun = run, True
        return run

    def _start(self) -> Run:
        """A run beside whatever the process has, the one of the folder if there is one."""
        if self._folder is None:
            return self._wandb.init(reinit="create_new")
        self._folder.mkdir(parents=True, exist_ok=True)
        known = self._folder / "wandb" / "id"
        again: dict[str, Any] = {}
        if known.exists():
            again = {"id": known.read_text(encoding="utf-8").strip(), "resume": "allow"}
        run = self._wandb.init(dir=self._folder, name=self._folder.name, reinit="create_new", **again)
        known.parent.mkdir(exist_ok=True)
        known.write_text(run.id, encoding="utf-8")
        return run


BY_NAME: dict[str, Callable[[Path], Writer]] = {
    "tensorboard": lambda folder: TensorBoard(folder / "tensorboard"),
    "wandb": WandB,
}


@final
class Writers:
    """Several writers as one; it raises nothing once it is made."""

    def __init__(self, writers: Iterable[Writer] = ()):
        self._writers = list(writers)
        self.raise_errors = False

    def __len__(self) -> int:
        return len(self._writers)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for writer in list(self._writers):
            self._try(writer, lambda writer=writer: writer.write(step, numbers))

    def close(self) -> None:
        for writer in list(self._writers):
            self._try(writer, writer.close)

    def _try(self, writer: Writer, work: Callable[[], None]) -> None:
        """Do the work of a writer; drop a writer that raises; training and the other writers continue."""
        try:
            work()
        except Exception as error:
            if self.raise_errors:
                raise
            self._writers.remove(writer)
            words = str(error).splitlines()[:1] or [type(error).__name__]
            with suppress(Warning):  # `python -W error`
                warn(f"{type(writer).__name__} writes no more: {words[0]} (history.csv continues)")


def open_writers(chosen: str | Iterable[str | Writer], folder: Path | None) -> Writers:
    """The writers that are named or given; those by name keep their files in `folder`.

    Raises:
        MissingExtra: where the package of a name is not installed.
    """
    names = [chosen] if isinstance(chosen, str) else list(chosen)
    return Writers([_writer(one, folder) for one in names])


def _writer(chosen: str | Writer, folder: Path | None) -> Writer:
    if not isinstance(chosen, str):
        if not isinstance(chosen, Writer):
            raise UsageError(
                f"expected a writer, got {type(chosen).__name__}",
                hint="an object with write(step, numbers) and close(), or one of the names " + _known(),
            )
        return chosen
    if chosen not in BY_NAME:
        hint = near_misses(chosen, list(BY_NAME)) if chosen != "csv" else "history.csv is written without it"
        raise UsageError(f"expected a writer, {_known()}, got {chosen!r}", hint=hint)
    if folder is None:
        raise UsageError(f"the writer {chosen!r} needs a folder", hint="out='runs/mine'")
    return BY_NAME[chosen](folder)


def _known() -> str:
    return " or ".join(BY_NAME)


def _measured(numbers: Mapping[str, float]) -> dict[str, float]:
    """Names under one heading, without what was not measured."""
    return {f"{PREFIX}/{name}": float(value) for name, value in numbers.items() if not math.isnan(value)}
