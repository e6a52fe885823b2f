"""A run that is measured while it goes on: `history.csv` as it grows, and whether it still does.

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

HISTORY, BLOCKS, SETTINGS = "history.csv", "blocks.csv", "monitor.toml"
MEASURING = "measuring.json"
"""In the folder `state` while a measurement is made: its step, its products so far and at most."""
NEEDED = ("step", "seconds", "lambda_max")  # columns by which a history is known
PATIENCE_SECONDS, PATIENCE_ROWS = (
    60.0,
    5.0,
)  # without a line for so long, and for so many times its usual wait
WORDS = {"": math.nan, "True": 1.0, "False": 0.0}  # what a table writes that float() does not read

Status = Literal["finished", "going on", "measuring", "stopped"]
Row = dict[str, float]
"""The numbers of a measurement by column; nan where nothing was measured."""


@final
class Growing:
    """The folder of a monitor, read again when its files change.

    Args:
        folder: with `history.csv` in it, or `monitor.toml` where nothing is measured yet.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.rows: list[Row] = []
        self._lines: list[str] = []
        self._seen: tuple[int, int, int] | None = None
        self.refresh()

    def refresh(self) -> list[Row]:
        """The rows that are new since the last call; a file that was begun anew or cut is read anew."""
        found = self._stat()
        seen = (found.st_ino, found.st_size, found.st_mtime_ns)
        if seen == self._seen:
            return []
        lines = _whole_lines(self.folder / HISTORY) if (self.folder / HISTORY).exists() else []
        pairs = zip(lines, self._lines, strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if lines and not set(NEEDED) <= set(next(csv.reader(lines[:1]))):
            raise _no_history(self.folder)
        self.rows = [_numbers(row, self.folder) for row in csv.DictReader(lines)]
        self._lines, self._seen = lines, seen
        return self.rows[max(same - 1, 0) :]

    def last(self) -> Row:
        """The last measurement; empty before the first."""
        return self.rows[-1] if self.rows else {}

    def end(self) -> Row:
        """Where the loop of a finished run stood: step, seconds, share, skipped; empty if it is not said."""
        try:
            found = json.loads((self.folder / RESULT).read_text(encoding="utf-8"))["fields"]["end"]
            return {str(name): float(value) for name, value in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def column(self, name: str) -> list[float]:
        """One number of all measurements."""
        return [row.get(name, math.nan) for row in self.rows]

    def blocks(self) -> list[tuple[str, float]]:
        """The blocks of the last measurement that has them and their λ_max, the largest first."""
        try:
            table = list(csv.DictReader(_whole_lines(self.folder / BLOCKS)))
            last = [row for row in table if row["step"] == table[-1]["step"]]
            found = [(row["block"], _number(row["lambda_max"])) for row in last]
        except (OSError, KeyError):
            return []
        known = [(name, top) for name, top in found if top is not None and not math.isnan(top)]
        return sorted(known, key=lambda pair: -pair[1])

    def age(self) -> float:
        """Seconds since the last row, or since the last product of a measurement that is being made."""
        changed = [self._stat().st_mtime]
        with suppress(OSError):
            changed.append(os.stat(self.folder / STATE / MEASURING).st_mtime)
        return max(time.time() - max(changed), 0.0)

    def measuring(self) -> Row:
        """Step, products so far and expected products of the measurement that is being made, or nothing."""
        try:
            found = json.loads((self.folder / STATE / MEASURING).read_text(encoding="utf-8"))
            return {name: float(found[name]) for name in ("step", "products", "expected")}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def status(self) -> Status:
        """Finished, going on, measuring, or stopped: without a sign for longer than the patience."""
        if (self.folder / RESULT).exists():
            return "finished"
        if self.age() > self._patience():
            return "stopped"
        return "measuring" if self.measuring() else "going on"

    def _stat(self) -> os.stat_result:
        """Of the file that grows, or, before the first row, of the one that is there from the beginning."""
        for name in (HISTORY, SETTINGS):
            with suppress(OSError):
                return os.stat(self.folder / name)
        raise _no_history(self.folder)

    def _patience(self) -> float:
        """A minute, and several times the longest wait between the last lines."""
        times = [0.0, *self.column("seconds")][-10:]
        waits = [PATIENCE_ROWS * (later - earlier) for earlier, later in pairwise(times)]
        return max([PATIENCE_SECONDS, *(wait for wait in waits if not math.isnan(wait))])


def _no_history(folder: Path) -> UsageError:
    there = "" if folder.exists() else ", which is not there"
    words = f"expected the folder of a monitor, with its {HISTORY}, got {folder}{there}"
    return UsageError(words, hint=_others(folder))


def _others(folder: Path) -> str:
    """Folders of monitors near this one."""
    inside, beside = (sorted(place.glob(f"*/{HISTORY}")) for place in (folder, folder.parent))
    found = [path.parent for path in inside or beside]
    if found:
        return "there " + ("is " if len(found) == 1 else "are ") + ", ".join(map(str, found[:5]))
    return "cs.CurvatureMonitor(…, out=FOLDER) makes one"


def _whole_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[: text.rfind("\n") + 1].splitlines()


def _numbers(row: dict[str, str], folder: Path) -> Row:
    """The numbers of a row; columns of words are left out."""
    found = {name: number for name, word in row.items() if (number := _number(word)) is not None}
    if not set(NEEDED) <= found.keys():
        raise UsageError(f"expected rows of numbers in {folder / HISTORY}, got {row}")
    return found


def _number(word: str | None) -> float | None:
    try:
        return WORDS[word] if word in WORDS else float(word or "")
    except ValueError:
        return None
