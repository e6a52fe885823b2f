"""Tables and JSON on stdout; both read without colour."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import typer


def as_json(value: Any) -> None:
    """Print JSON."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[int] = ()) -> None:
    """Print aligned columns; those in `right` are numbers, aligned to the right."""
    words = [[_word(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in words) for i in range(len(header))]
    for number, row in enumerate(words):
        cells = [
            w.rjust(width) if i in right else w.ljust(width)
            for i, (w, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())
        if number == 0:
            typer.echo("  ".join("-" * width for width in widths))


def _word(cell: Any) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return "–" if math.isnan(cell) else f"{cell:.4g}"
    return str(cell)
