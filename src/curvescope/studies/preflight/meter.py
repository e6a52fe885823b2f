"""How much memory is in use, and how much was at most: of a card what torch holds, else of the process."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from pathlib import Path
from typing import final

import torch

from curvescope.engines.memory import free_bytes

if sys.platform != "win32":
    import resource

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@final
class Meter:
    """Bytes on one device; where a peak cannot be forgotten (not Linux), it is that of the whole process."""

    def __init__(self, device: torch.device):
        self._device = device

    def begin(self) -> int:
        """Bytes in use when nothing is left over; the peak counts from here."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        with suppress(OSError, AttributeError):  # another system
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory that is reused would hide what is needed
            FORGET.write_text("5", encoding="ascii")
        return self.now()

    def now(self) -> int:
        """Bytes in use."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _status("VmRSS")

    def peak(self) -> int:
        """Most bytes in use since `begin`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status("VmHWM")

    def free(self) -> int:
        """Bytes that could be taken now."""
        return free_bytes(self._device)


def _status(field: str) -> int:
    """A number of bytes in this process's status; elsewhere than on Linux its peak."""
    try:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return _peak_elsewhere()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def _peak_elsewhere() -> int:
    if sys.platform == "win32":
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
