"""How much memory could be allocated now."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

GROUP = Path("/sys/fs/cgroup")  # where Linux says what a container may have


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated now."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2 * 2**30  # no way to ask: assume a small machine


def free_host_bytes() -> int:
    """Memory of the machine that this process could have, in a container too."""
    free = free_bytes(torch.device("cpu"))
    with suppress(OSError, ValueError, IndexError):  # no container, or "max", which is no number
        most = int((GROUP / "memory.max").read_text())
        used = int((GROUP / "memory.current").read_text())
        files = next(x for x in (GROUP / "memory.stat").read_text().splitlines() if x.startswith("file "))
        free = min(free, most - used + int(files.split()[1]))  # files in its memory give way
    return max(free, 0)
