"""Atomic files: they are written completely or not at all, and survive a loss of power.

If a process is killed, the operating system still has its writes. If a machine loses power, only files and
folder entries synced with `fsync` survive. A sync takes some milliseconds, so code that writes often asks a
`SyncPace` if one is due.
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
from curvescope.runs.study_result import Shown

WORK_PER_SYNC = 10.0  # work between two syncs, as a multiple of the time of the last sync


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file atomically: after a loss of power it has its old content or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Sync everything below a folder to the disk, and the folder's own entry."""
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(place) / name)
        sync(Path(place))
    sync(folder.parent)


@final
class SyncPace:
    """Interval between syncs: ten times as much work as the last sync took.

    So a loss of power costs at most that much work, and syncs take at most an eleventh of the time.
    """

    def __init__(self) -> None:
        self._cost, self._last = 0.0, time.monotonic()

    def due(self) -> bool:
        """Return True if there was enough work since the last sync."""
        return time.monotonic() - self._last >= WORK_PER_SYNC * self._cost

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Time a sync."""
        start = time.monotonic()
        yield
        self._last = time.monotonic()
        self._cost = self._last - start


FREE_BYTES_NEEDED = 2**24  # bytes that a run of a small model takes
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error codes for a full disk, an exhausted quota and a file at its size limit."""


def check_writable(folder: Path) -> None:
    """Raise unless a run fits into the folder, which need not exist; the check leaves nothing behind."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".curvescope-") as file:
            file.write(bytes(2**16))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
        least = FREE_BYTES_NEEDED / 2**20
        shortage = f"only {free / 2**20:.0f} MiB are free, and a run takes at least {least:.0f} MiB"
        reason = "" if free >= FREE_BYTES_NEEDED else shortage
    except OSError as error:
        reason = error.strerror or str(error)
    finally:
        for place in missing:
            with suppress(OSError):
                place.rmdir()
    if reason:
        raise UsageError(
            f"expected a folder that can be written to, got {folder}: {reason}",
            hint="free some disk space, or choose another folder with --out",
        )


@contextmanager
def explain_full_disk(saved_progress: Callable[[], str]) -> Iterator[None]:
    """Turn the error of a full disk into one sentence that says what is saved."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK_ERRORS:
            raise
        raise CurvescopeError(
            f"the disk is full: {saved_progress()}",
            hint="free some disk space and run the same command again: it continues",
        ) from error


def write_figures(result: Shown, folder: Path) -> None:
    """Write every figure as SVG and PNG."""
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
    """Write every table as CSV, and the result's other texts."""
    folder.mkdir(parents=True, exist_ok=True)
    tables, texts = result.tables(), result.files()
    check_distinct([*(f"{name}.csv" for name in tables), *texts])
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def check_distinct(names: Iterable[str]) -> None:
    """Raise if one of the files would overwrite another, also on file systems that ignore case."""
    seen: dict[str, str] = {}
    for name in names:
        if name.casefold() in seen:
            raise CurvescopeError(f"two outputs have the same name: {seen[name.casefold()]!r} and {name!r}")
        seen[name.casefold()] = name
