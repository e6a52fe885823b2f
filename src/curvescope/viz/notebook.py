"""HTML boxes for notebooks: facts, a table and a picture.

All text is escaped, images are data: URLs, there is no script, and colors follow the notebook, light or dark.
Display must never raise: a part that fails is left out, and if none is left the box shows `repr`.
"""

from __future__ import annotations

import base64
import math
import numbers
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from curvescope.core.blocks import Block

LIMIT = 100_000  # most characters of a box
PICTURE, DPI = 70_000, 100  # most characters of an image in it, and its dots per inch
SCALES = (1, 0.75, 0.5, 0.33)  # an image has the first of these sizes that fits
# Limits: rows of a table, of one below a figure, columns, characters of a cell.
ROWS, FEW, COLUMNS, TEXT = (20, 6, 8, 160)
LONG = 200  # a table with more rows is not previewed, because its first rows say little
COLORS = ("#1565a8", "#d1591b", "#37a791", "#6b2c5f", "#d8a900", "#808080", "#8cc4e8", "#d1608f")
CELL = "padding:1px 8px;border-bottom:1px solid rgba(128,128,128,.25)"
Part = Callable[[], str]


def box(thing: Any, name: str, *parts: Part) -> str:
    """Return a box with a name and the parts that succeed and fit into LIMIT; without any, `repr`."""
    made: list[str] = []
    for make in parts:
        with suppress(Exception):  # any exception: an incomplete box is better than an error
            found = make()
            if sum(map(len, made)) + len(found) < LIMIT - 1000:
                made.append(found)
    inside = "".join(made) or f"<pre>{escape(repr(thing)[: LIMIT // 10])}</pre>"
    style = "max-width:60em;line-height:1.4"
    return f'<div class="curvescope" style="{style}"><div><b>{_text(name)}</b></div>{inside}</div>'


def result_box(
    result: Any,
    opening: Callable[[], str],
    summary: Callable[[], Iterable[Sequence[str]]],
    figures: Callable[[], Mapping[str, Figure]],
    tables: Callable[[], Mapping[str, pd.DataFrame]],
) -> str:
    """Return the box of a study's result: opening, most important numbers, first figure and table."""
    return box(
        result,
        type(result).__name__,
        lambda: paragraph(opening()),
        lambda: cards(summary()),
        lambda: picture(lambda: next(iter(figures().values()))),
        lambda: begun(*next(iter(tables().items()))),
    )


def paragraph(text: str) -> str:
    """Return a paragraph; empty for empty text."""
    return f"<p style='margin:.4em 0'>{_text(text, most=10 * TEXT)}</p>" if text else ""


def facts(pairs: Mapping[str, Any]) -> str:
    """Return names and values on one line that may wrap."""
    items = (f"<span style='opacity:.7'>{_text(name)}</span> {_cell(value)}" for name, value in pairs.items())
    return f"<div style='margin:.2em 0'>{' &nbsp; '.join(items)}</div>" if pairs else ""


def cards(lines: Iterable[Sequence[str]]) -> str:
    """Return the most important numbers as cards: (label, value, explanation) each."""
    style = "display:inline-block;vertical-align:top;margin:.3em 1.4em .3em 0;max-width:18em"
    return "".join(
        f"<div style='{style}'><div style='opacity:.7'>{_text(label)}</div><b>{_text(value)}</b>"
        f"<div style='opacity:.7;font-size:85%'>{_text(words)}</div></div>"
        for label, value, words in list(lines)[:ROWS]
    )


def table(
    header: Sequence[str], rows: Iterable[Sequence[Any]], *, count: int | None = None, most: int = ROWS
) -> str:
    """Return the first rows and columns of a table; `count` is the number of rows if not all are given."""
    rows = [list(row) for row in rows]
    count = len(rows) if count is None else count
    head = "".join(f"<th style='{CELL};text-align:left'>{_text(name)}</th>" for name in header[:COLUMNS])
    body = "".join(f"<tr>{''.join(map(_td, row[:COLUMNS]))}</tr>" for row in rows[:most])
    left = [f"{count - most:,} more rows"] if count > most else []
    left += [f"{len(header) - COLUMNS:,} more columns"] if len(header) > COLUMNS else []
    more = f"<div style='opacity:.7'>… {_text(' and '.join(left))}</div>" if left else ""
    return f"<table style='border-collapse:collapse;margin:.4em 0'><tr>{head}</tr>{body}</table>{more}"


def blocks(roles: Mapping[str, Sequence[Block]]) -> str:
    """Return blocks by role (`blocks.by_role`): a bar of their shares of all entries, and a table."""
    sizes = {role: sum(block.size for block in found) for role, found in roles.items()}
    total = sum(sizes.values())
    rows = []
    for role, found in roles.items():
        shapes = " or ".join(dict.fromkeys(" × ".join(map(str, block.shape)) for block in found))
        name = found[0].name if len(found) == 1 else role
        rows.append([name, len(found), shapes, sizes[role], f"{sizes[role] / total:.1%}"])
    return bar(sizes) + table(["role", "blocks", "shape", "parameters", "share"], rows)


def frame(data: pd.DataFrame) -> str:
    """Return the first rows of a data frame; for a long one (a curve, all entries) only their number."""
    if len(data) > LONG:
        return f"<div style='opacity:.7'>{len(data):,} rows in .to_frame()</div>"
    rows = data.head(ROWS).itertuples(index=False, name=None)
    return table([str(name) for name in data.columns], rows, count=len(data))


def begun(name: str, data: pd.DataFrame) -> str:
    """Return a name and the first few rows of a table of a result; the rest is in `tables()`."""
    rows = data.head(FEW).itertuples(index=False, name=None)
    told = table([str(column) for column in data.columns], rows, count=len(data), most=FEW)
    where = f"<div style='opacity:.7'>.tables()[{_text(repr(name))}]</div>"
    return f"<div style='margin:.4em 0;overflow-x:auto'>{where}{told}</div>"


def bar(shares: Mapping[str, float]) -> str:
    """Return one stacked bar of shares, largest first, with a legend; small shares are summed as `others`."""
    total = sum(shares.values())
    if not shares or not total > 0:
        return ""
    order = sorted(shares.items(), key=lambda item: -item[1])
    most = len(COLORS) - 1
    kept = order if len(order) <= most + 1 else [*order[:most], ("others", sum(v for _, v in order[most:]))]
    drawn, legend, at = [], [], 0.0
    for color, (name, value) in zip(COLORS, kept, strict=False):
        width, words = 600 * value / total, f"{_text(name)} {value / total:.1%}"
        place = f'x="{at:.1f}" width="{width:.1f}" height="14"'
        drawn.append(f'<rect {place} fill="{color}"><title>{words}</title></rect>')
        legend.append(f'<span style="color:{color}">■</span> {words}')
        at += width
    svg = f'<svg viewBox="0 0 600 14" style="width:100%;max-width:600px" role="img">{"".join(drawn)}</svg>'
    return f"<div style='margin:.3em 0'>{svg}<div style='font-size:85%'>{' &nbsp; '.join(legend)}</div></div>"


def picture(draw: Callable[[], Figure], words: str = "") -> str:
    """Return a matplotlib figure drawn by `draw` as an image, with a lower resolution if it is too large.
    Figures that `draw` opens are closed, so that a notebook does not show them twice.
    """
    import matplotlib.pyplot as plt

    before = set(plt.get_fignums())
    try:
        with plt.ioff(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            address = _address(draw())
    finally:
        for number in set(plt.get_fignums()) - before:
            plt.close(number)
    if not address:
        return ""
    return f'<img src="{address}" alt="{_text(words)}" style="max-width:100%;background:white">'


def _address(figure: Figure) -> str:
    """Return a data: URL of the figure, with a reduced palette; empty if it is too large."""
    from PIL import Image

    file = BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    with Image.open(file) as drawn:
        whole = drawn.convert("RGB")
    for scale in SCALES:
        width, height = (max(round(scale * length), 1) for length in whole.size)
        # An octree keeps the colors of thin lines; median cut would turn them gray.
        palette = whole.resize((width, height)).quantize(64, method=Image.Quantize.FASTOCTREE)
        smaller = BytesIO()
        palette.save(smaller, "png", optimize=True)
        found = f"data:image/png;base64,{base64.b64encode(smaller.getvalue()).decode()}"
        if len(found) <= PICTURE:
            return found
    return ""


def _td(value: Any) -> str:
    side = "right" if _is_number(value) else "left"
    return f"<td style='{CELL};text-align:{side}'>{_cell(value)}</td>"


def _cell(value: Any) -> str:
    """Format a value as escaped text: whole numbers with commas, others to four digits."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return f"{int(value):,}"
    if _is_number(value):
        return f"{float(value):.4g}" if math.isfinite(value) else "–"
    return _text(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _text(value: Any, most: int = TEXT) -> str:
    text = str(value)
    return escape(text if len(text) <= most else f"{text[: most - 1]}…")
