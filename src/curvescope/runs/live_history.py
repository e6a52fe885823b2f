"""Live view of a monitored run: the rows of `history.csv` so far, and the status of the run.

A monitor adds a line to `history.csv` for every measurement and lines to `blocks.csv` for its blocks;
`state/measuring.json` is there during a measurement; `result.json` comes last. Read whole lines only.
"""

from __future__ import annotations

import csv
import json
import math
import os
import time
from contextlib import suppress
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Literal, final

from curvescope.core.errors import UsageError
from curvescope.runs.pieces import RESULT, STATE

HISTORY, BLOCKS, STEPS, SETTINGS = "history.csv", "blocks.csv", "steps.csv", "monitor.toml"
MEASURING = "measuring.json"
"""File in the folder `state` during a measurement: its step, its products so far and their maximum."""
NEEDED = ("step", "seconds", "lambda_max")  # columns that every history has
# Time without a new row, and multiple of the usual time between rows, after which a run counts as stopped.
PATIENCE_SECONDS, PATIENCE_ROWS = (60.0, 5.0)
WORDS = {"": math.nan, "True": 1.0, "False": 0.0}  # table entries that float() cannot parse

Status = Literal["finished", "going on", "measuring", "stopped"]
Row = dict[str, float]
"""Numbers of a measurement by column; NaN if nothing was measured."""


@final
class LiveHistory:
    """Folder of a monitor; its files are read again when they change.

    Args:
        folder: A folder with `history.csv`, or with `monitor.toml` if nothing is measured yet.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows: list[Row] = []
        self._lines: list[str] = []
        self._seen: tuple[int, int, int] | None = None
        self.refresh()

    def refresh(self) -> list[Row]:
        """Return the rows added since the last call; a replaced or truncated file is read anew."""
        stat = self._stat()
        signature = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if signature == self._seen:
            return []
        lines = _complete_lines(self.folder / HISTORY) if (self.folder / HISTORY).exists() else []
        pairs = zip(lines, self._lines, strict=False)
        num_equal = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if lines and not set(NEEDED) <= set(next(csv.reader(lines[:1]))):
            raise _missing_history(self.folder)
        self.rows = [_parse_row(row, self.folder) for row in csv.DictReader(lines)]
        self._lines, self._seen = lines, signature
        return self.rows[max(num_equal - 1, 0) :]

    def last(self) -> Row:
        """Return the last measurement; empty before the first."""
        return self.rows[-1] if self.rows else {}

    def end(self) -> Row:
        """Return the final state of a finished run: step, seconds, share, skipped; empty if none."""
        try:
            found = json.loads((self.folder / RESULT).read_text(encoding="utf-8"))["fields"]["end"]
            return {str(name): float(value) for name, value in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def column(self, name: str) -> list[float]:
        """Return one column of all measurements."""
        return [row.get(name, math.nan) for row in self.rows]

    def blocks(self) -> list[tuple[str, float]]:
        """Return the blocks of the last measurement that has any, with their λ_max, largest first."""
        try:
            table = list(csv.DictReader(_complete_lines(self.folder / BLOCKS)))
            found = [(row["step"], row["block"], _parse_number(row["lambda_max"])) for row in table]
        except (OSError, KeyError):
            return []
        known = [row for row in found if row[2] is not None and not math.isnan(row[2])]
        last = [(name, top) for step, name, top in known if step == known[-1][0] and top is not None]
        return sorted(last, key=lambda pair: -pair[1])

    def table(self, name: str) -> list[dict[str, float | str]]:
        """The complete rows of another file of the folder; empty if it does not exist."""
        with suppress(OSError):
            found = []
            for row in csv.DictReader(_complete_lines(self.folder / name)):
                numbers = {key: _parse_number(word) for key, word in row.items() if key is not None}
                found.append({k: str(row[k]) if v is None else v for k, v in numbers.items()})
            return found
        return []

    def age(self) -> float:
        """Return the seconds since the last row, or since the last product of a running measurement."""
        changed = [self._stat().st_mtime]
        with suppress(OSError):
            changed.append(os.stat(self.folder / STATE / MEASURING).st_mtime)
        return max(time.time() - max(changed), 0.0)

    def measuring(self) -> Row:
        """Return step, products so far and expected products of a running measurement; empty without one."""
        try:
            progress = json.loads((self.folder / STATE / MEASURING).read_text(encoding="utf-8"))
            return {name: float(progress[name]) for name in ("step", "products", "expected")}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def status(self) -> Status:
        """Status: finished, running, measuring, or stopped (no update for longer than the patience)."""
        if (self.folder / RESULT).exists():
            return "finished"
        if self.age() > self._patience():
            return "stopped"
        return "measuring" if self.measuring() else "going on"

    def _stat(self) -> os.stat_result:
        """Return the file status of the history, or of the settings before the first row."""
        for name in (HISTORY, SETTINGS):
            with suppress(OSError):
                return os.stat(self.folder / name)
        raise _missing_history(self.folder)

    def _patience(self) -> float:
        """Return a minute, or several times the longest recent interval between rows if that is more."""
        times = [0.0, *self.column("seconds")][-10:]
        waits = [PATIENCE_ROWS * (later - earlier) for earlier, later in pairwise(times)]
        return max([PATIENCE_SECONDS, *(wait for wait in waits if not math.isnan(wait))])


def _missing_history(folder: Path) -> UsageError:
    missing = "" if folder.exists() else ", which does not exist"
    message = f"expected the folder of a monitor, with its {HISTORY}, got {folder}{missing}"
    return UsageError(message, hint=_nearby_histories(folder))


def _nearby_histories(folder: Path) -> str:
    """Hint that lists folders of monitors near this one."""
    inside, beside = (sorted(place.glob(f"*/{HISTORY}")) for place in (folder, folder.parent))
    folders = [path.parent for path in inside or beside]
    if folders:
        return "there " + ("is " if len(folders) == 1 else "are ") + ", ".join(map(str, folders[:5]))
    return "cs.CurvatureMonitor(…, out=FOLDER) creates one"


def _complete_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[: text.rfind("\n") + 1].splitlines()


def _parse_row(row: dict[str, str], folder: Path) -> Row:
    """Return the numbers of a row, without its text columns."""
    found = {name: number for name, word in row.items() if (number := _parse_number(word)) is not None}
    if not set(NEEDED) <= found.keys():
        raise UsageError(f"expected rows of numbers in {folder / HISTORY}, got {row}")
    return found


def _parse_number(word: str | None) -> float | None:
    try:
        return WORDS[word] if word in WORDS else float(word or "")
    except ValueError:
        return None
