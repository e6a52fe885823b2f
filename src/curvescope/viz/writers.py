"""Tables as text: CSV, JSON, Markdown and LaTeX, made from data frames; nothing here opens a file."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

from curvescope.core.errors import UsageError
from curvescope.viz import latex

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("csv", "json", "md", "tex")


def write(
    frame: pd.DataFrame, kind: str, *, name: str = "table", caption: str = "", tokens: Sequence[str] = ()
) -> str:
    """A data frame in one of the formats.

    Args:
        kind: csv, json, md or tex.
        name: the label of a LaTeX table.
        tokens: names of columns that hold tokens, whose spaces are shown in LaTeX and Markdown.
    """
    if kind not in FORMATS:
        raise UsageError(f"expected a format of {', '.join(FORMATS)}, got {kind!r}")
    if kind == "csv":
        return frame.to_csv(index=False)
    if kind == "json":
        return as_json(frame)
    if kind == "md":
        return markdown(frame, tokens=tokens)
    header, rows = [str(c) for c in frame.columns], frame.to_numpy(dtype=object).tolist()
    at = [i for i, column in enumerate(header) if column in tokens]
    return latex.table(header, rows, caption=caption or name, label=f"tab:{name}", tokens=at)


def write_all(
    tables: Mapping[str, pd.DataFrame], captions: Mapping[str, str], *, tokens: Sequence[str] = ()
) -> dict[str, str]:
    """Every table as JSON and Markdown, and all of them as one LaTeX document: {name of the file: text}."""
    found = {}
    for name, frame in tables.items():
        for kind in ("json", "md"):
            found[f"{name}.{kind}"] = write(frame, kind, tokens=tokens)
    parts: dict[str, str] = {}
    for name, frame in tables.items():
        own = _unused(latex.slug(name), parts)
        parts[own] = write(frame, "tex", name=own, caption=captions.get(name, name), tokens=tokens)
    return found | {"tables.tex": latex.document(parts)}


def _unused(name: str, taken: Mapping[str, str]) -> str:
    """The name, with a number behind it if it is taken."""
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return f"{name}-{number}" if name in taken else name


def as_json(frame: pd.DataFrame) -> str:
    """A list of rows; NaN becomes null."""
    rows = [
        {str(c): _plain(v) for c, v in zip(frame.columns, row, strict=True)}
        for row in frame.to_numpy(dtype=object).tolist()
    ]
    return json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def markdown(frame: pd.DataFrame, *, tokens: Sequence[str] = ()) -> str:
    """A Markdown table; numbers to the right, tokens as code with their control characters spelled out."""
    header = [str(c) for c in frame.columns]
    rows = frame.to_numpy(dtype=object).tolist()
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    lines = [_line([_md(name) for name in header]), _line(["---:" if r else "---" for r in right])]
    for row in rows:
        cells = [_md_cell(v, header[i] in tokens) for i, v in enumerate(row)]
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def visible(token: str) -> str:
    """A token on one line: control characters as escapes, spaces as they are."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in token)


def label(text: str, raw: str) -> str:
    """What to call a token: its text, or its bytes where UTF-8 could not read them."""
    return raw if "\ufffd" in text and raw else text


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _md_cell(value: object, token: bool) -> str:
    if _is_number(value):
        number = float(value)
        if math.isnan(number):
            return "–"
        return f"{int(number)}" if number.is_integer() and abs(number) < 1e15 else f"{number:.4g}"
    text = visible(str(value))
    if not token:
        return _md(text)
    fence = "`" * (1 + max((len(run) for run in _runs(text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") or not text.strip() else ""
    return f"{fence}{pad}{text}{pad}{fence}".replace("|", r"\|")


def _runs(text: str) -> list[str]:
    return re.findall(r"`+", text)


def _md(text: str) -> str:
    for c in r"\`*_{}[]<>#|":
        text = text.replace(c, "\\" + c)
    return text


def _plain(value: object) -> bool | int | float | str | None:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if _is_number(value):
        return float(value) if math.isfinite(value) else None
    return str(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
