"""Shared code of the benchmarks: interleaved repeats, ratios with ranges, peak memory, tables and files."""

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
        """Ratio of the times of `slow` and `fast`, compared within each round."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        ratios = [slow_time / fast_time for slow_time, fast_time in pairs]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def interleave(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 7,
    budget: float = 10.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time the candidates in turn, round after round, every other round backwards.

    A temporary slowdown of the machine then affects all candidates. There are at least two rounds, and no new
    round starts after `budget` seconds. Call every candidate once before. With one thread, the clock
    `time.process_time` excludes the time of other processes on the core.
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
    """Return the seconds per call, over as many calls as fill a sample."""
    first = _once(call, clock)
    more = round(SAMPLE / first)
    return sum(_once(call, clock) for _ in range(more)) / more if more > 1 else first


def _once(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    result = call()
    seconds = clock() - start
    del result
    return seconds


def peak_memory(call: Callable[[], Any]) -> tuple[Any, float | None]:
    """Return the result of a call, and the additional MB at its peak; None if unknown.

    Only Linux can reset the peak of a process; on other systems the memory is None.
    """
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory freed before would hide the memory of this call
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        result = call()
        return result, (_status("VmHWM") - before) / 1e3
    except OSError:
        return call(), None


def _status(field: str) -> int:
    """Return a number of kB in this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest entry."""
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def short(x: float | None) -> str:
    """Format a number with two digits, or all digits before the point of a large one."""
    if x is None:
        return "–"
    return f"{x:.0f}" if x >= 9.95 else f"{x:.1f}" if x >= 0.95 else f"{x:.2f}"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table with aligned columns."""
    cells = [list(map(str, row)) for row in (head, ["-"] * len(head), *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    cells[1] = ["-" * width for width in widths]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join(lines)


def arguments(text: str, name: str) -> argparse.Namespace:
    """Parse --quick, --out and --threads, and set the number of threads."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest cases, few rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/bench") / name, help="folder of JSON and PNG")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1, the steadiest)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return args


def machine() -> dict[str, Any]:
    """Return the machine, the versions and the date of the numbers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def state() -> str:
    """Return one line about the machine."""
    info = machine()
    return (
        f"torch {info['torch']}, {info['threads']} thread(s) of {info['cpus']} cores, load {info['load'][0]}"
    )


def write(out: Path, name: str, results: Mapping[str, Any], figure: Any) -> None:
    """Write NAME.json and NAME.png into the folder `out`, and print their paths to stderr."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine(), **results}, indent=1, default=vars)
    (out / f"{name}.json").write_text(text + "\n")
    figure.savefig(out / f"{name}.png", dpi=150)
    print(f"{out}/{name}.json, {out}/{name}.png", file=sys.stderr)
