"""Heat maps with linear, logarithmic or signed logarithmic colors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from curvescope.viz.interactive import Scene
from curvescope.viz.scenes.curves import SignedLog, axis, named, nothing, numbers, power, symbols
from curvescope.viz.style import DIVERGING, SEQUENTIAL

Colors = Literal["linear", "log", "signed", "signed linear"]
LAYER = re.compile(r"L(\d+)\.(.+)")
DECADES = 4  # decades of colors below the largest value
TALL, WIDE = 22, 24  # pixels of a row, of a column
LETTERS = 3  # mean pixels per letter of a vertical name
LETTERS_ACROSS = 24  # most letters side by side on a phone; longer names are vertical
MOST_COLUMNS, MOST_ROWS = 24, 60  # most names along a side; of more, only every second, third, … is written


class Cell(NamedTuple):
    """Value of a cell and its hover text."""

    value: float
    words: str


def grid_map(
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[Cell | None]],
    *,
    label: str,
    colors: Colors = "log",
    limits: tuple[float, float] | None = None,
    titles: tuple[str, str] = ("", ""),
) -> Scene:
    """Return a heat map; a cell that is None or not finite stays empty.

    Args:
        colors: "signed" is logarithmic with both signs; with "log", values that are not positive stay empty.
        limits: Range of the values, so that variants of a scene can share colors.
        titles: Titles of the columns and of the rows.
    """
    scale = scale_of([c.value for row in cells for c in row if c], colors, limits)
    if scale is None:
        return nothing("not measured", 220)
    height = max(260, 130 + TALL * min(len(rows), MOST_ROWS) + LETTERS * max(map(len, columns), default=0))
    layout = {
        "height": height,
        "width": 140 + WIDE * len(columns),
        "margin": {"l": 20, "r": 10, "t": 60, "b": 20},
        "xaxis": named(
            columns,
            most=MOST_COLUMNS,
            title=titles[0],
            tickangle=-90 if sum(map(len, columns)) > LETTERS_ACROSS else 0,
        ),
        "yaxis": named(rows, most=MOST_ROWS, title=titles[1]) | {"range": [len(rows) - 0.5, -0.5]},
        "coloraxis": color_bar(scale, label),
    }
    return {"data": [_heat(cells, scale)], "layout": layout}


def layer_map(cells: Mapping[str, Cell], *, label: str, colors: Colors, names: Sequence[str] = ()) -> Scene:
    """Return a map of blocks named like L3.W_Q: rows are roles, columns are layers; blocks outside layers
    have their own column.

    Args:
        names: Names of all blocks, so that variants of a scene have the same rows; by default those of
            `cells`.
    """
    names = list(names) or list(cells)
    inside = [match for name in names if (match := LAYER.fullmatch(name))]
    outside = [name for name in names if not LAYER.fullmatch(name)]
    layers = sorted({int(match[1]) for match in inside})
    roles = list(dict.fromkeys(match[2] for match in inside))
    scale = scale_of([cell.value for cell in cells.values()], colors, None)
    if scale is None:
        return nothing("not measured", 220)
    beside = [[cells.get(name)] for name in outside]
    if not inside:
        return grid_map(outside, [""], beside, label=label, colors=colors)
    rows = max(len(roles), len(outside), 6)
    data = [_heat([[cells.get(f"L{layer}.{role}") for layer in layers] for role in roles], scale)]
    if outside:
        data.append(_heat(beside, scale) | {"xaxis": "x2", "yaxis": "y2"})
    layout = {
        "height": 140 + TALL * rows,
        "width": 220 + WIDE * len(layers),
        "margin": {"l": 20, "r": 20, "t": 70, "b": 40},
        "coloraxis": color_bar(scale, label),
        **_two_axes(layers, roles, outside, rows),
    }
    return {"data": data, "layout": layout}


def _two_axes(
    layers: Sequence[int], roles: Sequence[str], outside: Sequence[str], rows: int
) -> dict[str, Any]:
    """Return the axes of the map and of the column beside it, with equal row heights."""
    down = {"range": [rows - 0.5, -0.5]}
    share = max(0.75, 1 - (WIDE + 30) / (WIDE * len(layers) + 120)) if outside else 1.03
    names = [str(layer) for layer in layers]
    axes = {
        "xaxis": named(names, most=MOST_COLUMNS, title="layer", domain=[0, share - 0.03]),
        "yaxis": named(roles, most=MOST_ROWS) | down,
    }
    if outside:
        blank = {"ticks": "", "showline": False, "showgrid": False, "showticklabels": False}
        axes["xaxis2"] = axis("", domain=[share, 1], anchor="y2") | blank
        axes["yaxis2"] = named(outside, most=MOST_ROWS) | down | {"side": "right", "anchor": "x2"}
    return axes


class Scale(NamedTuple):
    """Color scale: the map from values to positions, and its two ends."""

    kind: Colors
    low: float
    high: float
    linear: float  # linear range of signed colors

    def of(self, value: float) -> float:
        """Return the position of a value on the scale; nan if it has none."""
        if self.kind == "signed":
            return float(SignedLog(self.linear).of(value))
        if self.kind == "log":
            return math.log10(value) if value > 0 else math.nan
        return value


def scale_of(values: Sequence[float], kind: Colors, limits: tuple[float, float] | None) -> Scale | None:
    """Return the scale for these values; None if there is no value to show."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return None
    if kind == "signed" and min(known) >= 0:
        kind = "log"
    if kind == "log":
        known = [v for v in known if v > 0] or [1.0]
        top = max(known)
        low, high = limits or (max(min(known), top * 10.0**-DECADES), top)
        return Scale(kind, math.log10(low), max(math.log10(high), math.log10(low) + 0.5), math.nan)
    top = max(map(abs, known)) or 1.0
    if kind == "signed":
        end = float(SignedLog(top * 10.0**-DECADES).of(top))
        return Scale(kind, -end, end, top * 10.0**-DECADES)
    low, high = limits or ((-top, top) if kind == "signed linear" else (min(*known, 0.0), max(known)))
    return Scale(kind, low, high if high > low else low + 1.0, math.nan)


def color_bar(scale: Scale, label: str) -> dict[str, Any]:
    """Return the color scale and its bar above the map."""
    stops = DIVERGING if scale.kind.startswith("signed") else SEQUENTIAL
    title = {"text": symbols(label), "side": "top"}
    bar: dict[str, Any] = {"title": title, "orientation": "h", "thickness": 10}
    bar |= {"x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "len": 0.7, "exponentformat": "power"}
    if scale.kind == "signed":
        top = scale.linear * 10.0**DECADES
        bar |= SignedLog(scale.linear).ticks(-top, top, most=2)
    elif scale.kind == "log":
        first, last = math.ceil(scale.low - 1e-9), math.floor(scale.high + 1e-9)
        if last > first:
            found = list(range(first, last + 1, math.ceil((last - first + 1) / 6)))
            bar |= {"tickvals": found, "ticktext": [power(10.0**e) for e in found]}
        else:
            found = np.linspace(scale.low, scale.high, 4)
            bar |= {"tickvals": numbers(found), "ticktext": [f"{10.0**e:.2g}" for e in found]}
    colors = [[i / (len(stops) - 1), stop] for i, stop in enumerate(stops)]
    return {"colorscale": colors, "cmin": scale.low, "cmax": scale.high, "colorbar": bar}


def _heat(cells: Sequence[Sequence[Cell | None]], scale: Scale) -> dict[str, Any]:
    """Return the trace: positions on the color scale, and the values as hover text."""
    return {
        "type": "heatmap",
        "z": [numbers([scale.of(c.value) if c else math.nan for c in row]) for row in cells],
        "text": [[symbols(c.words) if c else "" for c in row] for row in cells],
        "hovertemplate": "%{text}<extra></extra>",
        "hoverongaps": False,
        "coloraxis": "coloraxis",
        "xgap": 1,
        "ygap": 1,
    }


def plane(
    a: np.ndarray,
    b: np.ndarray,
    values: np.ndarray,
    *,
    label: str,
    titles: tuple[str, str],
    colors: Colors = "linear",
    limits: tuple[float, float] | None = None,
) -> Scene:
    """Values (A, B) at a (A,) (horizontal) and b (B,) (vertical), with a cross at the origin."""
    scale = scale_of(values.ravel().tolist(), colors, limits)
    if scale is None:
        return nothing("no finite value", 220)
    bar = color_bar(scale, label)
    coloring = {"start": scale.low, "end": scale.high, "size": (scale.high - scale.low) / 14}
    data = [
        {
            "type": "contour", "x": numbers(a), "y": numbers(b), "z": [numbers(row) for row in values.T],
            "coloraxis": "coloraxis", "contours": coloring, "line": {"width": 0.7},
            "hovertemplate": f"a = %{{x:.3g}}, b = %{{y:.3g}}<br>{label}: %{{z:.5g}}<extra></extra>",
        },
        {
            "type": "scatter", "x": [0], "y": [0], "mode": "markers", "showlegend": False,
            "marker": {"symbol": "cross-thin-open", "size": 12, "color": "#000000", "line": {"width": 2}},
            "hovertemplate": "the model<extra></extra>",
        },
    ]  # fmt: skip
    layout = {
        "height": 480, "margin": {"l": 20, "r": 20, "t": 70, "b": 20}, "coloraxis": bar,
        "xaxis": axis(f"a: {titles[0]}"), "yaxis": axis(f"b: {titles[1]}"),
    }  # fmt: skip
    return {"data": data, "layout": layout}
