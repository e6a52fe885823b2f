"""Figures that belong to the package: what products cost where they were measured last, and what got worse.

`figures.json` has one entry for a device, model, size, tokens, precision and contender, null where a number
is not known. A run on a device of that name is compared with it; `record` writes a run's own figures there.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from curvescope.studies.hvp.costs import GIB, Committed, Cost, Measured

FILE = Path(__file__).with_name("figures.json")
MARGIN, CPU_MARGIN = 0.10, 0.25  # a CPU's clock wanders, and CPUs of one name here are many
KEYS = ("device", "model", "size", "tokens", "tf32", "contender")
NUMBERS = ("gradients", "frozen", "peak_GiB", "seconds")
Entry = dict[str, Any]


def read(path: Path = FILE) -> list[Entry]:
    """All entries; none where there is no file."""
    return json.loads(path.read_text(encoding="utf-8"))["entries"] if path.exists() else []


def known(cost: Cost, path: Path = FILE) -> list[Committed]:
    """What is committed of the contenders of a run, on the same device and work."""
    entries = {_key(entry): entry for entry in read(path)}
    found = [entries.get(_key(entry)) for entry in _entries(cost, "")]
    return [
        Committed(e["contender"], torch=e["torch"] or "", **{name: _number(e[name]) for name in NUMBERS})
        for e in found
        if e
    ]


def record(cost: Cost, torch_version: str, path: Path = FILE) -> int:
    """Write a run's figures: new entries at the end, others in their places. How many there are of it."""
    mine = [entry for entry in _entries(cost, torch_version) if entry["seconds"] is not None]
    entries = {_key(entry): entry for entry in (*read(path), *mine)}
    lines = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in entries.values())
    path.write_text(f'{{"schema": 1, "entries": [\n{lines}\n]}}\n', encoding="utf-8")
    return len(mine)


def compared(cost: Cost) -> list[str]:
    """What is slower or takes more memory than was committed, by more than the margin: a sentence each."""
    on_cpu = cost.device == "cpu"
    margin = CPU_MARGIN if on_cpu else MARGIN
    found = []
    for then in cost.committed:
        m = cost.of(then.contender)
        pairs = [("gradients", m.ratio()[0], then.gradients)]
        pairs += [("gradients, frozen", m.frozen_ratio()[0], then.frozen)]
        pairs += [] if on_cpu else [("GiB", m.peak / GIB, then.peak_GiB)]
        for unit, now, before in pairs:
            if now > before * (1 + margin):  # never where one of them is nan
                worse = f"{100 * (now / before - 1):.0f} % more than the committed {before:.2f}"
                version = f" (torch {then.torch})" if then.torch else ""
                found.append(f"{m.name} takes {now:.2f} {unit}, {worse}{version}")
    return found


def _entries(cost: Cost, torch_version: str) -> list[Entry]:
    model, size = cost.model.split(" ", 1)
    work = (cost.device, model, size, cost.tokens.removesuffix(" tokens"), cost.tf32)
    return [
        dict(zip(KEYS, (*work, m.name), strict=True)) | _figures(m) | {"torch": torch_version}
        for m in cost.measured
    ]


def _figures(m: Measured) -> Entry:
    seconds = statistics.median(m.seconds) if m.seconds else math.nan
    values = (m.ratio()[0], m.frozen_ratio()[0], m.peak / GIB, seconds)
    return {
        name: float(f"{value:.4g}") if value == value else None
        for name, value in zip(NUMBERS, values, strict=True)
    }


def _key(entry: Entry) -> tuple[Any, ...]:
    return tuple(entry[name] for name in KEYS)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
