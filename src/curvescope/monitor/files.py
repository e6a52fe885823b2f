"""The folder of a run that is watched: rows as they come, and what is needed to resume.

`history.csv` and `blocks.csv` get their rows one measurement at a time, `monitor.toml` says what is measured
and on which contents, `config.toml` makes it a run folder, and `state/` has the vectors and the account of
time. A process that is killed leaves complete rows behind.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import tomli_w

from curvescope import __version__
from curvescope.core.errors import CurvescopeError, UsageError
from curvescope.monitor.columns import BLOCK_COLUMNS, COLUMNS, TEXT
from curvescope.runs.disk.atomic_files import check_writable, write_figures, write_tables
from curvescope.runs.folder import CONFIG, STATE, environment
from curvescope.runs.live_history import BLOCKS, HISTORY, SETTINGS, STEPS
from curvescope.runs.pieces import RESULT, Pieces
from curvescope.runs.study_result import Shown

ACCOUNT = "account.json"
ACCOUNT_KEYS = {"elapsed", "spent", "costs", "used", "product_seconds", "calls", "seen"}
STUDY = "monitor"
HEADERS = {HISTORY: [*COLUMNS, TEXT], BLOCKS: list(BLOCK_COLUMNS), STEPS: ["step", "loss"]}
WORDS = {TEXT, "block"}
Row = dict[str, Any]


@final
class Files:
    """One folder.

    Args:
        settings: what the numbers depend on, in words and numbers that TOML has.
        contents: fingerprint of the data and of the model's shape.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], contents: str, about: Mapping[str, str]):
        self.folder, self.state = folder, folder / STATE
        own = {"contents": contents, **settings}
        check_writable(folder)
        if (folder / SETTINGS).exists():
            _refuse_other(folder, own)
        elif folder.exists() and any(folder.iterdir()):
            raise UsageError(
                f"expected a folder of this monitor, or a new one, got {folder} with other files in it",
                hint="choose another out",
            )
        self.own()
        self.finished = (folder / RESULT).exists()
        if not (folder / SETTINGS).exists():
            words = {"study": STUDY, "version": __version__, **about, **settings}
            (folder / CONFIG).write_text(tomli_w.dumps(words), encoding="utf-8")
            (folder / "env.json").write_text(json.dumps(environment(), indent=1), encoding="utf-8")
            (folder / SETTINGS).write_text(tomli_w.dumps(own), encoding="utf-8")

    def own(self) -> None:
        """Note that this process works on the folder; raise if another one does."""
        if not Pieces(self.state).own():
            raise CurvescopeError(f"another process works on {self.folder}", hint="choose another out")

    def read(self, name: str) -> list[Row]:
        """The complete rows of one of the files."""
        path = self.folder / name
        return read_rows(path) if path.exists() else []

    def rewrite(self, name: str, rows: Sequence[Row]) -> None:
        """Put these rows in the place of all."""
        partial = self.folder / f"{name}.partial"
        partial.write_text(_lines(name, rows, header=True), encoding="utf-8")
        partial.replace(self.folder / name)

    def append(self, name: str, rows: Sequence[Row]) -> None:
        """Add rows behind the others, in one write."""
        new = not (self.folder / name).exists()
        with (self.folder / name).open("a", encoding="utf-8", newline="") as file:
            file.write(_lines(name, rows, header=new))

    def go_on(self) -> None:
        """Mark a finished run as unfinished."""
        if self.finished:
            (self.folder / RESULT).unlink(missing_ok=True)
            self.finished = False

    def finish(self, result: Shown) -> None:
        """Figures and tables, then the result, then nothing is left of the state."""
        write_figures(result, self.folder / "figures")
        write_tables(result, self.folder / "tables")
        result.save(self.folder)
        shutil.rmtree(self.state, ignore_errors=True)
        self.finished = True

    def account(self) -> dict[str, Any] | None:
        """Read the account that `keep` wrote; None if it is missing or damaged."""
        try:
            account = json.loads((self.state / ACCOUNT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return account if isinstance(account, dict) and account.keys() >= ACCOUNT_KEYS else None

    def keep(self, account: Mapping[str, Any]) -> None:
        """Write the account of time; complete or not at all."""
        partial = self.state / f"{ACCOUNT}.partial"
        partial.write_text(json.dumps(account), encoding="utf-8")
        partial.replace(self.state / ACCOUNT)


def _refuse_other(folder: Path, own: Mapping[str, Any]) -> None:
    """Raise where the folder was begun with other settings, or on other contents."""
    try:
        theirs = tomllib.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CurvescopeError(f"could not read {folder / SETTINGS}: {error}") from error
    for name in [*own, *(set(theirs) - set(own))]:
        if theirs.get(name) != own.get(name):
            what = (
                "other data or a model of another shape"
                if name == "contents"
                else f"{name} = {theirs.get(name)!r}, not {own.get(name)!r}"
            )
            raise UsageError(f"{folder} was begun with {what}", hint="choose another out")


def read_rows(path: Path) -> list[Row]:
    """The complete rows of a file; numbers as floats, steps as whole ones."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(path, error) from error
    whole = text[: text.rfind("\n") + 1]
    lines = list(csv.reader(io.StringIO(whole)))
    if not lines:
        return []
    header = lines[0]
    if "step" not in header:
        raise _unreadable(path, "it has no column step")
    return [
        {name: _read(path, line, name, cell) for name, cell in zip(header, row, strict=True)}
        for line, row in enumerate(lines[1:], start=2)
        if len(row) == len(header)
    ]


def _unreadable(path: Path, why: object) -> UsageError:
    return UsageError(f"could not read {path}: {why}", hint="repair the file, or choose another out")


def _read(path: Path, line: int, name: str, cell: str) -> Any:
    if name in WORDS:
        return cell
    try:
        if name == "step":
            return int(float(cell))
        return float(cell) if cell else float("nan")
    except (ValueError, OverflowError):
        raise UsageError(
            f"expected a number in {path}, line {line}, column {name}, got {cell!r}",
            hint="correct the cell, empty it, or delete the line",
        ) from None


def _lines(name: str, rows: Iterable[Row], *, header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, HEADERS[name], lineterminator="\n")
    if header:
        writer.writeheader()
    for row in rows:
        writer.writerow({key: _cell(row.get(key)) for key in HEADERS[name]})
    return text.getvalue()


def _cell(value: Any) -> Any:
    return "" if value is None or value != value else value
