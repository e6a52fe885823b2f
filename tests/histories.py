"""Folders of a monitor, written by hand."""

from __future__ import annotations

from pathlib import Path

COLUMNS = [
    "step",
    "seconds",
    "share",
    "loss",
    "lambda_max",
    "lambda_max_error",
    "converged",
    "lr_lambda_max",
    "threshold",
]


def row(step: int, *, seconds: float | None = None, top: float = 10.0, ratio: float = 0.5) -> str:
    """A line of history.csv; what is not said is one value for all."""
    words = [step, step / 10 if seconds is None else seconds, 0.05, 2.5, top, 0.01, True, ratio, 2.0]
    return ",".join(map(str, words)) + "\n"


def begin(folder: Path, *rows: str) -> Path:
    """A folder with these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "history.csv").write_text(",".join(COLUMNS) + "\n" + "".join(rows), encoding="utf-8")
    return folder


def add(folder: Path, text: str) -> None:
    """More of history.csv, whole lines or not."""
    with (folder / "history.csv").open("a", encoding="utf-8") as file:
        file.write(text)
