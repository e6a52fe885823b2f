"""Files that outlive their process, and a loss of power: written whole or not at all, and on the disk.

A process that is killed leaves what it has written to the system; a machine that loses power leaves what was
brought to the disk (`fsync`), files and the folders that name them. That costs some milliseconds, so whoever
writes often asks a `Pace` when the next time is due.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.runs.shown import Shown

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


NEEDED = 2**24  # bytes that a run of a small model takes
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says of a disk, or a share of one, that is full, and of a file that may not grow."""


def check_writable(folder: Path) -> None:
    """Raise unless a run fits into the folder, which need not be there; nothing is left behind."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".curvescope-") as file:
            file.write(bytes(2**16))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
        left = (
            f"only {free / 2**20:.0f} MiB are left there, and a run takes at least {NEEDED / 2**20:.0f} MiB"
        )
        reason = "" if free >= NEEDED else left
    except OSError as error:
        reason = error.strerror or str(error)
    finally:
        for place in missing:
            with suppress(OSError):
                place.rmdir()
    if reason:
        raise UsageError(
            f"expected a folder that can be written to, got {folder}: {reason}",
            hint="make room, or choose another with --out",
        )


@contextmanager
def full_disk_said(kept: Callable[[], str]) -> Iterator[None]:
    """A disk that fills up is one sentence, with words on what is kept."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise CurvescopeError(
            f"the disk is full: {kept()}", hint="make room, and the same command goes on from there"
        ) from error


def write_figures(result: Shown, folder: Path) -> None:
    """Every figure as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figures = result.figures()
    check_distinct(figures)
    with plt.rc_context({"svg.hashsalt": "curvescope", "svg.fonttype": "path"}):
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{name}.png", dpi=150)
            plt.close(figure)


def write_tables(result: Shown, folder: Path) -> None:
    """Every table as CSV, and the result's other texts."""
    folder.mkdir(parents=True, exist_ok=True)
    tables, texts = result.tables(), result.files()
    check_distinct([*(f"{name}.csv" for name in tables), *texts])
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def check_distinct(names: Iterable[str]) -> None:
    """Raise where one of the files would overwrite another, also where capitals are not told apart."""
    seen: dict[str, str] = {}
    for name in names:
        if name.casefold() in seen:
            raise CurvescopeError(f"two outputs have one name: {seen[name.casefold()]!r} and {name!r}")
        seen[name.casefold()] = name
