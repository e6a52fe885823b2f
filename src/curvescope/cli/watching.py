"""How far a run is: bars on a terminal, lines elsewhere, and a line on how to go on where it was stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import typer

from curvescope.core.progress import Progress, listening
from curvescope.runs.folder import Standing


@final
class Watch:
    """What was heard last, of pieces and of the loop inside the current one."""

    def __init__(self, piece: Progress, loop: Progress):
        self._piece, self._loop = piece, loop
        self.words, self.number, self.total, self.steps = "", 0, 0, 0

    def piece(self, what: str, number: int, total: int) -> None:
        """A piece begins."""
        self.words, self.number, self.total, self.steps = what, number, total, 0
        self._piece(what, number, total)

    def loop(self, what: str, done: int, total: int) -> None:
        """A step of the loop inside is done."""
        self.steps = total
        self._loop(what, done, total)

    def stopped(self, kept: Standing) -> str:
        """Where the same command goes on."""
        if kept.steps:
            of = f" of {self.steps}" if self.steps else ""
            where = f"step {kept.steps}{of} of piece {self.number} of {self.total}: {self.words}"
            return f"stopped; the same command goes on from {where}"
        if kept.pieces:
            return f"stopped; the same command goes on behind {kept.pieces} of {kept.total} pieces"
        return "stopped; nothing is kept yet, the same command begins anew"


def _nothing(what: str, done: int, total: int) -> None:
    pass


@contextmanager
def watched(quiet: bool) -> Iterator[Watch]:
    """Two bars on a terminal, one for the pieces of the study and one for the loop inside the current one."""
    if quiet or not sys.stderr.isatty():
        line: Progress = lambda what, done, total: typer.echo(f"{done}/{total} {what}", err=True)  # noqa: E731
        watch = Watch(_nothing if quiet else line, _nothing)
        with listening(watch.loop):
            yield watch
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        whole, inner = bars.add_task("starting", total=None), bars.add_task("", total=None)

        def piece(what: str, number: int, total: int) -> None:
            bars.update(whole, description=what, completed=number - 1, total=total)

        def loop(what: str, done: int, total: int) -> None:
            bars.update(inner, description=f"  {what}", completed=done, total=total or None)

        watch = Watch(piece, loop)
        with listening(watch.loop):
            yield watch
