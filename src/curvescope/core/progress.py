"""Progress of slow loops: a bar on stderr, only in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 2.0
Progress = Callable[[str, int, int], None]
"""Function called with (what, done, total) after each step."""

_listener: ContextVar[Progress | None] = ContextVar("curvescope_progress", default=None)
_inside: ContextVar[bool] = ContextVar("curvescope_progress_inside", default=False)


@contextmanager
def listening(listener: Progress | None) -> Iterator[None]:
    """Send the progress of every loop inside to `listener` instead of the terminal."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def track(items: Sequence[T] | Iterable[T], what: str, *, total: int | None = None) -> Iterator[T]:
    """Yield `items` and show the progress of the outermost loop after two seconds.

    Loops inside a tracked loop show nothing, unless the outer loop has only one step. Without a terminal and
    without a listener, nothing is shown.
    """
    if _inside.get():
        yield from items
        return
    count = total if total is not None else len(items) if isinstance(items, Sequence) else 0
    listener = _listener.get()
    if listener is None and not sys.stderr.isatty():
        yield from items
        return
    token = _inside.set(count != 1)
    bar = None if listener is not None else _Bar(what, count)
    try:
        for done, item in enumerate(items, start=1):
            yield item
            if listener is not None:
                listener(what, done, count)
            elif bar is not None:
                bar.update(done)
    finally:
        if bar is not None:
            bar.close()
        _inside.reset(token)


class _Bar:
    """Progress bar of rich that appears after PATIENCE_SECONDS."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.start, self.progress = what, total, time.monotonic(), None

    def update(self, done: int) -> None:
        if self.progress is None:
            if time.monotonic() - self.start < PATIENCE_SECONDS or 0 < self.total <= done:
                return
            from rich.console import Console
            from rich.progress import Progress as RichProgress

            self.progress = RichProgress(console=Console(stderr=True), transient=True)
            self.progress.start()
            self.task = self.progress.add_task(self.what, total=self.total or None)
        self.progress.update(self.task, completed=done)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
