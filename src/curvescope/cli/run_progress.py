"""Progress of a run: bars on a terminal, a line for every finished piece elsewhere, and how to resume."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import typer

from curvescope.core.progress import Progress, listening
from curvescope.runs.folder import SavedProgress, Say

Part = Callable[[str, float, float, float], None]
"""Called with (what, before, behind, total) as one of several studies begins: the work that is done before
and behind it, and all of it, in any unit.
"""


MOST_LINES = 10  # of finished pieces, when stderr is not a terminal


@final
class Watch:
    """Latest messages of the studies, of the pieces of a study, and of the loop inside the current piece."""

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
        self.say = say  # lines for a person
        self.answer = say if answer is None else answer  # what came out of a piece
        self.fail = say if fail is None else fail  # why the piece in hand did not end
        self.words, self.number, self.total, self.steps = "", 0, 0, 0

    def part(self, what: str, before: float, behind: float, total: float) -> None:
        """One of several studies begins."""
        self.words, self.number, self.total, self.steps = "", 0, 0, 0
        self._part(what, before, behind, total)

    def piece(self, what: str, number: int, total: int) -> None:
        """A piece begins."""
        self.words, self.number, self.total, self.steps = what, number, total, 0
        self._piece(what, number, total)

    def loop(self, what: str, done: int, total: int) -> None:
        """A step of the loop inside is done."""
        self.steps = total
        self._loop(what, done, total)

    def stopped(self, kept: SavedProgress) -> str:
        """Say where the same command resumes."""
        if kept.steps:
            of = f" of {self.steps}" if self.steps else ""
            where = f"step {kept.steps}{of} of piece {self.number} of {self.total}: {self.words}"
            return f"stopped; the same command goes on from {where}"
        if kept.pieces:
            return f"stopped; the same command goes on behind {kept.pieces} of {kept.total} pieces"
        return "stopped; nothing is kept yet, the same command begins anew"


@final
class Lines:
    """Lines for finished pieces, at most about ten for a study: every piece of a few, a tenth of many.

    A piece that answers is named together with its answer; of many pieces only those at a tenth are printed.
    """

    def __init__(self) -> None:
        self._open, self._front, self._due = "", "", True

    def part(self, what: str, before: float, behind: float, total: float) -> None:
        """The study that begins."""
        self.close()
        typer.echo(what, err=True)
        self._front = "  "

    def piece(self, what: str, number: int, total: int) -> None:
        """The piece before is done."""
        self.close()
        self._open = f"{self._front}{number}/{total} {what}"
        tenth = MOST_LINES * number // total > MOST_LINES * (number - 1) // total
        self._due = number == 1 or total <= MOST_LINES or tenth

    def say(self, line: str) -> None:
        """A line of its own."""
        typer.echo(f"{self._front}{line}", err=True)

    def answer(self, line: str) -> None:
        """Show the result of a piece after its name."""
        if not self._open:
            self.say(line)
            return
        self._open = f"{self._open}: {line}"
        self.close()

    def fail(self, line: str) -> None:
        """The piece in hand is not done."""
        self._open = ""
        self.say(line)

    def close(self) -> None:
        """The last piece is done."""
        if self._open and self._due:
            typer.echo(self._open, err=True)
        self._open = ""


def _nothing(what: str, *numbers: float) -> None:
    pass


@contextmanager
def watched(quiet: bool) -> Iterator[Watch]:
    """Bars on a terminal: all studies where there are several, the pieces of one, the loop inside a piece."""
    if quiet:
        watch = Watch(_nothing, _nothing, _nothing, lambda line: None)
        with listening(watch.loop):
            yield watch
        return
    if not sys.stderr.isatty():
        lines = Lines()
        watch = Watch(lines.part, lines.piece, _nothing, lines.say, lines.answer, lines.fail)
        with listening(watch.loop):
            yield watch
        lines.close()
        return
    with _bars() as watch, listening(watch.loop):
        yield watch


@contextmanager
def _bars() -> Iterator[Watch]:
    """Three bars with what is done and the time that is left; that of all studies goes on with the pieces."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    left = TimeRemainingColumn(compact=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), left, TextColumn("left")
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        whole, pieces, inner = (bars.add_task("", total=None, visible=False) for _ in range(3))
        here = (0.0, 0.0)

        def part(what: str, before: float, behind: float, total: float) -> None:
            nonlocal here
            here = before, behind
            bars.update(whole, description=what, completed=before, total=total, visible=True)
            bars.update(pieces, visible=False)
            bars.update(inner, visible=False)

        def piece(what: str, number: int, total: int) -> None:
            done, words = number - 1, f"piece {number} of {total}: {what}"
            bars.update(whole, completed=here[0] + (here[1] - here[0]) * done / total)
            bars.update(pieces, description=words, completed=done, total=total, visible=True)
            bars.update(inner, visible=False)

        def loop(what: str, done: int, total: int) -> None:
            bars.update(inner, description=f"  {what}", completed=done, total=total or None, visible=True)

        def echo(line: str) -> None:
            bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield Watch(part, piece, loop, echo)
