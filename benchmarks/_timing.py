"""What the benchmarks share: interleaved repeats, ratios with their spread, peak memory, tables and files."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SAMPLE = 0.02  # seconds that one sample takes at least; quick candidates are repeated within it


@dataclass(frozen=True)
class Ratio:
    """Median over rounds, and the range: a machine that others use is judged by the range."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.low)}–{short(self.high)})"


@dataclass(frozen=True)
class Timing:
    """Seconds per call of each candidate, one number per round."""

    seconds: dict[str, list[float]]

    def ratio(self, slow: str, fast: str) -> Ratio:
        """How many times longer `slow` takes than `fast`, compared within each round."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        found = [one / two for one, two in pairs]
        return Ratio(statistics.median(found), min(found), max(found))


def interleave(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 7,
    budget: float = 10.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time the candidates in turn, round after round, every other round backwards.

    What slows the machine down for a while then slows all of them down. At least two rounds; no new one is
    begun after `budget` seconds. Candidates have been called before. With one thread, `time.process_time` as
    clock leaves out the time that others had the core.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    start = time.perf_counter()
    for number in range(rounds):
        if number > 1 and time.perf_counter() - start > budget:
            break
        for name in reversed(candidates) if number % 2 else candidates:
            seconds[name].append(_sample(candidates[name], clock))
    return Timing(seconds)


def _sample(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Seconds per call, over as many calls as fill a sample."""
    first = _once(call, clock)
    more = round(SAMPLE / first)
    return sum(_once(call, clock) for _ in range(more)) / more if more > 1 else first


def _once(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    result = call()
    found = clock() - start
    del result
    return found


def peak_memory(call: Callable[[], Any]) -> tuple[Any, float | None]:
    """The result of a call, and the MB it needed at its peak beyond what was there; None if unknown.

    Linux forgets a process's peak when asked to; elsewhere there is no number.
    """
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed before would hide what is needed now
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        result = call()
        return result, (_status("VmHWM") - before) / 1e3
    except OSError:
        return call(), None


def _status(field: str) -> int:
    """A number of kB in this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def relative_error(found: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest entry."""
    return float((found.double() - want.double()).abs().max() / want.double().abs().max())


def short(x: float | None) -> str:
    """Two digits of a small number, all before the point of a large one."""
    if x is None:
        return "–"
    return f"{x:.0f}" if x >= 9.95 else f"{x:.1f}" if x >= 0.95 else f"{x:.2f}"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with columns of equal width."""
    cells = [list(map(str, row)) for row in (head, ["-"] * len(head), *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    cells[1] = ["-" * width for width in widths]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join(lines)


def arguments(text: str, name: str) -> argparse.Namespace:
    """--quick, --out and --threads, with the threads set."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest cases, few rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/bench") / name, help="folder of JSON and PNG")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1, the steadiest)")
    found = parser.parse_args()
    torch.set_num_threads(found.threads)
    return found


def machine() -> dict[str, Any]:
    """Where and when the numbers were made."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def state() -> str:
    """One line about the machine."""
    here = machine()
    return (
        f"torch {here['torch']}, {here['threads']} thread(s) of {here['cpus']} cores, load {here['load'][0]}"
    )


def write(out: Path, name: str, results: Mapping[str, Any], figure: Any) -> None:
    """NAME.json and NAME.png in the folder `out`; says where on stderr."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine(), **results}, indent=1, default=vars)
    (out / f"{name}.json").write_text(text + "\n")
    figure.savefig(out / f"{name}.png", dpi=150)
    print(f"{out}/{name}.json, {out}/{name}.png", file=sys.stderr)
