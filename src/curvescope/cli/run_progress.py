"""Show the progress of a run: bars on a terminal, a line for every finished piece elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import typer

from curvescope.core.progress import Progress, listening
from curvescope.runs.folder import SavedProgress, Say

Part = Callable[[str, float, float, float], None]
"""Called with (name, start, end, total) when one of several studies begins: the work that is done before it,
the work that is done after it, and the total work, in any unit.
"""
MAX_LINES = 10  # of finished pieces, when stderr is not a terminal


@final
class ProgressDisplay:
    """Callbacks that show messages and progress, and the current position in the run."""

    def __init__(
        self,
        part: Part,
        piece: Progress,
        loop: Progress,
        say: Say,
        answer: Say | None = None,
        fail: Say | None = None,
    ):
        self._part, self._piece, self._loop = part, piece, loop
        self.say = say  # messages
        self.answer = say if answer is None else answer  # the result of a piece
        self.fail = say if fail is None else fail  # the error that ended the current piece
        self.name, self.number, self.total, self.steps = "", 0, 0, 0

    def part(self, name: str, start: float, end: float, total: float) -> None:
        """Show that one of several studies begins."""
        self.name, self.number, self.total, self.steps = "", 0, 0, 0
        self._part(name, start, end, total)

    def piece(self, name: str, number: int, total: int) -> None:
        """Show that a piece begins."""
        self.name, self.number, self.total, self.steps = name, number, total, 0
        self._piece(name, number, total)

    def loop(self, name: str, done: int, total: int) -> None:
        """Show that a step of the loop inside the piece is done."""
        self.steps = total
        self._loop(name, done, total)

    def saved_progress(self, saved: SavedProgress) -> str:
        """Describe where the same command will resume."""
        if saved.steps:
            of = f" of {self.steps}" if self.steps else ""
            position = f"step {saved.steps}{of} of piece {self.number} of {self.total}: {self.name}"
            return f"stopped; the same command resumes from {position}"
        if saved.pieces:
            return f"stopped; the same command resumes after {saved.pieces} of {saved.total} pieces"
        return "stopped; nothing is saved yet, the same command starts again"


@final
class Lines:
    """Print lines about finished pieces: all pieces of a short study, about ten of a long one.

    A piece that has a result is printed together with its result.
    """

    def __init__(self) -> None:
        self._pending, self._indent, self._due = "", "", True

    def part(self, name: str, start: float, end: float, total: float) -> None:
        """Print the study that begins."""
        self.close()
        typer.echo(name, err=True)
        self._indent = "  "

    def piece(self, name: str, number: int, total: int) -> None:
        """Print the previous piece and store the name of this one."""
        self.close()
        self._pending = f"{self._indent}{number}/{total} {name}"
        tenth = MAX_LINES * number // total > MAX_LINES * (number - 1) // total
        self._due = number == 1 or total <= MAX_LINES or tenth

    def say(self, line: str) -> None:
        """Print a message on its own line."""
        typer.echo(f"{self._indent}{line}", err=True)

    def answer(self, line: str) -> None:
        """Show the result of a piece after its name."""
        if not self._pending:
            self.say(line)
            return
        self._pending = f"{self._pending}: {line}"
        self.close()

    def fail(self, line: str) -> None:
        """Print the error that ended the current piece, instead of the piece."""
        self._pending = ""
        self.say(line)

    def close(self) -> None:
        """Print the last piece."""
        if self._pending and self._due:
            typer.echo(self._pending, err=True)
        self._pending = ""


def _nothing(name: str, *numbers: float) -> None:
    pass


@contextmanager
def progress_display(quiet: bool) -> Iterator[ProgressDisplay]:
    """Show progress in this block: bars on a terminal, lines elsewhere, nothing if `quiet`."""
    if quiet:
        display = ProgressDisplay(_nothing, _nothing, _nothing, lambda line: None)
        with listening(display.loop):
            yield display
        return
    if not sys.stderr.isatty():
        lines = Lines()
        display = ProgressDisplay(lines.part, lines.piece, _nothing, lines.say, lines.answer, lines.fail)
        with listening(display.loop):
            yield display
        lines.close()
        return
    with _bars() as display, listening(display.loop):
        yield display


@contextmanager
def _bars() -> Iterator[ProgressDisplay]:
    """Show three bars with the time left: all studies, the pieces of a study, the loop in a piece."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    time_left = TimeRemainingColumn(compact=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), time_left, TextColumn("left")
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        studies_bar, pieces_bar, loop_bar = (bars.add_task("", total=None, visible=False) for _ in range(3))
        study_start, study_end = 0.0, 0.0

        def part(name: str, start: float, end: float, total: float) -> None:
            nonlocal study_start, study_end
            study_start, study_end = start, end
            bars.update(studies_bar, description=name, completed=start, total=total, visible=True)
            bars.update(pieces_bar, visible=False)
            bars.update(loop_bar, visible=False)

        def piece(name: str, number: int, total: int) -> None:
            done, description = number - 1, f"piece {number} of {total}: {name}"
            bars.update(studies_bar, completed=study_start + (study_end - study_start) * done / total)
            bars.update(pieces_bar, description=description, completed=done, total=total, visible=True)
            bars.update(loop_bar, visible=False)

        def loop(name: str, done: int, total: int) -> None:
            bars.update(loop_bar, description=f"  {name}", completed=done, total=total or None, visible=True)

        def echo(line: str) -> None:
            bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield ProgressDisplay(part, piece, loop, echo)
