"""Whether a folder takes what will be written there: found out before the work, not behind it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from curvescope.core.errors import UsageError

NEEDED = 2**24  # bytes that a run of a small model takes
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a disk, or a share of one, that is full."""


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
        reason = "" if free >= NEEDED else f"only {free / 2**20:.0f} MiB are left there"
    except OSError as error:
        reason = error.strerror or str(error)
    finally:
        for place in missing:
            with suppress(OSError):
                place.rmdir()
    if reason:
        raise UsageError(
            f"expected a folder that can be written to, got {folder}: {reason}",
            hint="choose another with --out",
        )
