"""Print tables and JSON to stdout, readable without color."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import typer

from curvescope.core.config import Config, Value


def as_json(value: Any) -> None:
    """Print JSON. Values that JSON does not have, such as nan, become null."""
    typer.echo(json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False, default=str))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lines(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print label, value and description of each row in aligned columns."""
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    for label, value, words in rows:
        typer.echo(f"{label.ljust(widths[0])}  {value.rjust(widths[1])}  {words}".rstrip())


def setting(value: Value) -> str:
    """Return a setting as the user types it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings(kind: type[Config]) -> None:
    """Print every setting with its default, kind and meaning."""
    rows = [
        [s.name, "–" if s.default in (None, ()) else setting(s.default), s.kind, s.meaning]
        for s in kind.settings()
    ]
    rows += [["", "", "", f"{s.name} is also an option: --{s.name}"] for s in kind.settings() if s.option]
    table(["setting", "default", "kind", "meaning"], rows)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[int] = ()) -> None:
    """Print aligned columns. `right` lists the columns to align to the right."""
    words = [[_cell_text(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in words) for i in range(len(header))]
    for number, row in enumerate(words):
        cells = [
            w.rjust(width) if i in right else w.ljust(width)
            for i, (w, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())
        if number == 0:
            typer.echo("  ".join("-" * width for width in widths))


def _cell_text(cell: Any) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return "–" if math.isnan(cell) else f"{cell:.4g}"
    return str(cell)
