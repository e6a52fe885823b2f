"""Figures for a browser: convert matplotlib figures to plotly's JSON, and write pages that work offline.

Lines, error bars, bands, bars, steps, images, texts and legends are converted, with axes in the same
positions, so that hovering over a point shows its numbers.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import Container
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.typing import ColorType
    from numpy.typing import ArrayLike

Scene = dict[str, Any]
"""{"data": traces, "layout": …} as plotly.js reads it.

A scene with switches has two more entries: `controls`, a list of {"name": "matrix", "choices": ["H", "GGN"]},
and `variants`, from the choices joined by "|" in the order of the controls ("GGN|trace") to the data and
layout that take the scene's place. The scene itself is the variant of the first choices. A scene that differs
from the figure of the same name has its own `caption`.
"""
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
PIXELS = 88  # per inch
SHARP = 300  # images with fewer pixels along a side are enlarged
GREEK = {
    "sigma": "σ",
    "Sigma": "Σ",
    "Gamma": "Γ",
    "lambda": "λ",
    "Delta": "Δ",
    "propto": "∝",
    "|": "‖",
    "to": "→",
}


def scene(figure: Figure) -> Scene:
    """Convert the figure to plotly's JSON, without 3-D and polar axes."""
    figure.draw_without_rendering()  # computes the layout
    width, height = figure.get_size_inches()
    layout: Scene = {
        "width": int(width * PIXELS), "height": int(height * PIXELS) + 40, "hovermode": "closest",
        "plot_bgcolor": "white", "paper_bgcolor": "white", "shapes": [], "annotations": [], "images": [],
        "margin": {"l": 10, "r": 10, "t": 30, "b": 20}, "font": {"size": 12},
        "legend": {"groupclick": "togglegroup", "font": {"size": 11}},
    }  # fmt: skip
    data: list[Scene] = []
    shown: set[str] = set()
    drawn = [ax for ax in figure.axes if ax.get_visible() and ax.name == "rectilinear" and ax.axison]
    drawn = [ax for ax in drawn if ax.get_label() != "<colorbar>"]
    for number, ax in enumerate(drawn, start=1):
        key = "" if number == 1 else str(number)
        layout[f"xaxis{key}"] = _axis(ax, "x", f"y{key}")
        layout[f"yaxis{key}"] = _axis(ax, "y", f"x{key}")
        if ax.get_aspect() == 1:
            layout[f"xaxis{key}"] |= {"constrain": "domain"}
            layout[f"yaxis{key}"] |= {"constrain": "domain", "scaleanchor": f"x{key}"}
        data += _traces(ax, key, shown)
        layout["shapes"] += _rules(ax, key)
        layout["annotations"] += _texts(ax, key)
        layout["images"] += _pictures(ax, key)
    return {"data": data, "layout": layout}


def _axis(ax: Axes, which: str, anchor: str) -> Scene:
    axis = ax.xaxis if which == "x" else ax.yaxis
    low, high = ax.get_xlim() if which == "x" else ax.get_ylim()
    log = axis.get_scale() == "log"
    box = ax.get_position()
    found: Scene = {
        "domain": [float(box.x0), float(box.x1)] if which == "x" else [float(box.y0), float(box.y1)],
        "anchor": anchor,
        "type": "log" if log else "linear",
        "range": [math.log10(low), math.log10(high)] if log else [float(low), float(high)],
        "title": {"text": _words(axis.get_label_text()), "font": {"size": 12}},
        "showgrid": False,
        "exponentformat": "power",
        "zeroline": False,
        "showline": True,
        "linecolor": "black",
        "ticks": "outside",
        "automargin": True,
    }
    if log and abs(math.log10(high / low)) > 1.5:
        found["dtick"] = max(1, round(abs(math.log10(high / low)) / 6))
    labels = [text.get_text() for text in axis.get_ticklabels()]
    if type(axis.get_major_formatter()).__name__ in ("FixedFormatter", "FuncFormatter") and any(labels):
        found |= {
            "tickvals": [float(t) for t in axis.get_ticklocs()],
            "ticktext": [_words(t) for t in labels],
        }
    elif not any(labels):
        found |= {"showticklabels": False} | ({} if len(axis.get_ticklocs()) else {"ticks": ""})
    return found


def _traces(ax: Axes, key: str, shown: set[str]) -> list[Scene]:
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.patches import Rectangle, StepPatch

    found = []
    for container in ax.containers:
        bars = [p for p in container.get_children() if isinstance(p, Rectangle)]
        if bars:
            found.append(_polygons([_corners(bar) for bar in bars], bars[0].get_facecolor()))
            _name(found[-1], container.get_label(), shown)
    for patch in ax.patches:
        if isinstance(patch, StepPatch):
            values, edges, _ = patch.get_data()
            x, y = np.repeat(edges, 2), np.concatenate([[0], np.repeat(values, 2), [0]])
            found.append(_named(_line(x, y, patch.get_edgecolor(), patch.get_linewidth(), "-"), patch, shown))
    for group in ax.collections:
        if isinstance(group, LineCollection):
            x, y = _joined([np.asarray(part) for part in group.get_segments()])
            color = np.asarray(group.get_color())[0] if len(group.get_color()) else "black"
            found.append(
                _line(x, y, color, float(np.max(group.get_linewidth())), "-") | {"showlegend": False}
            )
        elif isinstance(group, PolyCollection) and len(group.get_facecolor()):
            parts = [np.asarray(path.vertices) for path in group.get_paths()]
            found.append(
                _polygons(parts, np.asarray(group.get_facecolor())[0])
                | {"showlegend": False, "hoverinfo": "skip"}
            )
    for line in ax.lines:
        if line.get_transform() == ax.transData and line.get_visible() and np.size(line.get_xdata()):
            trace = _line(line.get_xdata(), line.get_ydata(), line.get_color(), line.get_linewidth(),
                          str(line.get_linestyle()), line.get_marker(), line.get_alpha())  # fmt: skip
            edge = {"color": _color(line.get_markeredgecolor()), "width": line.get_markeredgewidth()}
            size, face = 1.2 * line.get_markersize(), _color(line.get_markerfacecolor())
            trace["marker"] = {"color": face, "size": size, "line": edge}
            found.append(_named(trace, line, shown))
    return [trace | {"xaxis": f"x{key}", "yaxis": f"y{key}"} for trace in found]


def _line(
    x: ArrayLike,
    y: ArrayLike,
    color: ColorType,
    width: float,
    style: str,
    marker: object = None,
    alpha: float | None = None,
) -> Scene:
    points = marker not in (None, "", "None", " ", "none")
    lines = style not in ("None", "", " ", "none")
    mode = "+".join([name for name, on in (("lines", lines), ("markers", points)) if on]) or "markers"
    return {
        "type": "scatter", "mode": mode, "x": _numbers(x), "y": _numbers(y),
        "opacity": 1 if alpha is None else alpha,
        "line": {"color": _color(color), "width": width, "dash": DASHES.get(style, "solid")},
        "showlegend": False,
        "hovertemplate": "%{x:.4g}, %{y:.5g}<extra>%{fullData.name}</extra>",
    }  # fmt: skip


def _polygons(parts: Sequence[np.ndarray], color: ColorType) -> Scene:
    x, y = _joined(parts)
    return {
        "type": "scatter", "mode": "lines", "x": _numbers(x), "y": _numbers(y), "fill": "toself",
        "fillcolor": _color(color), "line": {"width": 0.4, "color": "white"}, "showlegend": False,
        "hovertemplate": "%{x:.4g}, %{y:.5g}<extra>%{fullData.name}</extra>",
    }  # fmt: skip


def _corners(bar: Rectangle) -> np.ndarray:
    x, y, w, h = bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()
    return np.array([[x, y], [x, y + h], [x + w, y + h], [x + w, y], [x, y]])


def _joined(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate pieces with a gap between them."""
    gap = np.full((1, 2), np.nan)
    rows = [row for part in parts for row in (part, gap)]
    both = np.concatenate(rows) if rows else gap
    return both[:, 0], both[:, 1]


def _named(trace: Scene, artist: Artist | Container, shown: set[str]) -> Scene:
    _name(trace, artist.get_label(), shown)
    return trace


def _name(trace: Scene, label: object, shown: set[str]) -> None:
    """Name a trace; the legend lists a name once for all panels, and a click hides all its curves."""
    words = str(label)
    if words.startswith("_") or not words:
        trace["name"] = ""
        return
    trace |= {"name": _words(words), "legendgroup": words, "showlegend": words not in shown}
    shown.add(words)


def _rules(ax: Axes, key: str) -> list[Scene]:
    """Convert lines across the full panel."""
    found = []
    for line in ax.lines:
        (x0, x1), (y0, y1) = _ends(line.get_xdata()), _ends(line.get_ydata())
        style = {"color": _color(line.get_color()), "width": line.get_linewidth(),
                 "dash": DASHES.get(str(line.get_linestyle()), "dash")}  # fmt: skip
        layer = "above" if ax.images else "below"
        shape = {"type": "line", "x0": x0, "x1": x1, "y0": y0, "y1": y1, "line": style, "layer": layer}
        if line.get_transform() == ax.get_yaxis_transform(which="grid"):
            found.append(shape | {"xref": f"x{key} domain", "yref": f"y{key}"})
        elif line.get_transform() == ax.get_xaxis_transform(which="grid"):
            found.append(shape | {"xref": f"x{key}", "yref": f"y{key} domain"})
    return found


def _texts(ax: Axes, key: str) -> list[Scene]:
    found = []
    title = ax.get_title(loc="left") or ax.get_title()
    if title:
        side = "left" if ax.get_title(loc="left") else "center"
        found.append({
            "text": _words(title), "x": 0 if side == "left" else 0.5, "y": 1, "xref": f"x{key} domain",
            "yref": f"y{key} domain", "xanchor": side, "yanchor": "bottom", "showarrow": False,
            "font": {"size": 14},
        })  # fmt: skip
    for text in ax.texts:
        (x, y), kind = text.get_position(), text.get_transform()
        if hasattr(
            text, "xy"
        ):  # an annotation: its own position, or its target if the offset is given in points
            if text.xycoords not in ("data", "axes fraction"):  # pyright: ignore[reportAttributeAccessIssue]
                continue
            if text.anncoords != text.xycoords:  # pyright: ignore[reportAttributeAccessIssue]
                x, y = text.xy  # pyright: ignore[reportAttributeAccessIssue]
            kind = ax.transData if text.xycoords == "data" else ax.transAxes  # pyright: ignore[reportAttributeAccessIssue]
        if kind == ax.transData:
            x = math.log10(x) if ax.get_xscale() == "log" else x
            y = math.log10(y) if ax.get_yscale() == "log" else y
        elif kind != ax.transAxes:
            continue
        domain = " domain" if kind == ax.transAxes else ""
        found.append({
            "text": _words(text.get_text()), "x": float(x), "y": float(y), "xref": f"x{key}{domain}",
            "yref": f"y{key}{domain}", "showarrow": False, "xanchor": text.get_horizontalalignment(),
            "textangle": -float(text.get_rotation()),
            "yanchor": {"center": "middle", "baseline": "bottom", "center_baseline": "middle"}.get(
                text.get_verticalalignment(), text.get_verticalalignment()
            ),
            "font": {"size": float(text.get_fontsize()), "color": _color(text.get_color())},
        })  # fmt: skip
    return found


def _pictures(ax: Axes, key: str) -> list[Scene]:
    from matplotlib.image import imsave

    found = []
    for image in ax.images:
        file, pixels = BytesIO(), image.to_rgba(np.ma.asarray(image.get_array()), bytes=True)
        times = -(-SHARP // min(pixels.shape[:2]))  # because a browser interpolates between pixels
        imsave(file, pixels.repeat(times, 0).repeat(times, 1), format="png")
        left, right, bottom, top = image.get_extent()
        source = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")
        found.append({
            "source": source, "xref": f"x{key}", "yref": f"y{key}", "x": float(left), "y": float(top),
            "sizex": float(abs(right - left)), "sizey": float(abs(bottom - top)), "sizing": "stretch",
            "layer": "below",
        })  # fmt: skip
    return found


def _ends(values: ArrayLike) -> tuple[float, float]:
    found = np.asarray(values, dtype=float).ravel()
    return (float(found[0]), float(found[-1])) if len(found) else (0.0, 0.0)


def _numbers(values: ArrayLike) -> list[float | None]:
    """Convert numbers for JSON, which has no NaN; seven digits are enough for a screen."""
    found = np.ma.filled(np.ma.asarray(values).astype(float), np.nan)
    return [float(f"{v:.7g}") if math.isfinite(v) else None for v in found.ravel()]


def _color(color: ColorType) -> str:
    from matplotlib.colors import to_rgba

    r, g, b, a = to_rgba(color)
    return f"rgba({round(255 * r)},{round(255 * g)},{round(255 * b)},{a:.3g})"


def _words(text: str) -> str:
    """Convert mathematics between dollars to HTML: σ$^{6}$ to σ<sup>6</sup>."""
    text = html.escape(text, quote=False).replace("\n", "<br>")
    if "$" not in text:
        return text
    text = re.sub(r"\\(?:math(?:rm|bf|it)|text)\{([^{}]*)\}", r"\1", text).replace("$", "")
    text = re.sub(r"\\([A-Za-z]+|\|)", lambda m: GREEK.get(m[1], m[1]), text)
    text = re.sub(r"\^(\{[^{}]*\}|.)", lambda m: f"<sup>{m[1].strip('{}')}</sup>", text)
    return re.sub(r"_(\{[^{}]*\}|.)", lambda m: f"<sub>{m[1].strip('{}')}</sub>", text)


def page(title: str, scenes: Mapping[str, Scene], captions: Mapping[str, str]) -> str:
    """Return one HTML page with every scene and its caption; it contains plotly's script."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtra(
            "an interactive page needs plotly, which is not installed", hint="pip install plotly"
        ) from error
    body = []
    for number, (name, found) in enumerate(scenes.items()):
        body.append(f"<h2>{html.escape(name.replace('_', ' '))}</h2>")
        words = found.get("caption") or captions.get(name, "")
        body.append(f"<p>{html.escape(words)}</p><div id='f{number}'></div>")
        shown = {key: found[key] for key in ("data", "layout")}
        text = json.dumps(shown, ensure_ascii=False).replace("</", "<\\/")
        call = f"Plotly.newPlot('f{number}', f.data, f.layout, {{displaylogo: false, responsive: false}})"
        body.append(f"<script>{{ const f = {text}; {call}; }}</script>")
    style = "body{font:16px/1.5 system-ui,sans-serif;max-width:1500px;margin:24px auto;padding:0 16px}"
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{style} p{{color:#5c6875;max-width:900px}}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{html.escape(title)}</h1>{''.join(body)}</body></html>"
    )
