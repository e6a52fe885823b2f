"""Ctrl-C that waits for a few assignments which belong together; parameters thawed for a time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch import Tensor


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C is heard at the end of the block; only what takes no time belongs inside.

    Signals reach the main thread alone, so elsewhere there is nothing to do.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    heard: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if heard:
        handler(*heard[0])


@contextmanager
def thawed(frozen: list[Tensor]) -> Iterator[None]:
    """Frozen parameters are seen in a graph that is made inside, and frozen again after interrupts too."""
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        try:
            _freeze(frozen)
        finally:  # again, for an interrupt that came before the first had begun
            _freeze(frozen)


def _freeze(parameters: list[Tensor]) -> None:
    with uninterrupted():
        for p in parameters:
            p.requires_grad_(False)
