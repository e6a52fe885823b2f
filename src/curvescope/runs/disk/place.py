"""Whether a folder takes what will be written there: found out before the work, and said where it ends."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from curvescope.core.errors import CurvescopeError, UsageError

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
