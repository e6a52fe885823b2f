"""Files that outlive their process, and a loss of power: written whole or not at all, and on the disk.

A process that is killed leaves what it has written to the system; a machine that loses power leaves what was
brought to the disk (`fsync`), files and the folders that name them. That costs some milliseconds, so whoever
writes often asks a `Pace` when the next time is due.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

TIMES = 10.0  # as much work between two visits to the disk as the last visit took


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file that is there as it was before, or whole, whenever the power goes."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # where folders cannot be opened
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Bring everything below a folder to the disk, and its name."""
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(place) / name)
        sync(Path(place))
    sync(folder.parent)


@final
class Pace:
    """When the next visit to the disk is due: after ten times as much work as the last one took.

    So a loss of power costs at most that much work, and visits at most an eleventh of the time.
    """

    def __init__(self) -> None:
        self._cost, self._last = 0.0, time.monotonic()

    def due(self) -> bool:
        """Whether there was enough work since the last visit."""
        return time.monotonic() - self._last >= TIMES * self._cost

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Time a visit."""
        start = time.monotonic()
        yield
        self._last = time.monotonic()
        self._cost = self._last - start
