"""Curves with error bands or bars, on linear, logarithmic or signed logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curvescope.core.number_format import between, rounded, with_error
from curvescope.viz.interactive import Scene
from curvescope.viz.style import MARKS, ON_SCREEN, SUBSCRIPT, Look, on_screen

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
SYMBOLS = {"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down"}


def symbols(text: str) -> str:
    """Convert subscripts to HTML: λ_max to λ<sub>max</sub>."""
    return SUBSCRIPT.sub(r"\1<sub>\2</sub>", text)


def switched(controls: Mapping[str, Sequence[str]], draw: Callable[..., Scene]) -> Scene:
    """Return a scene with switches; `draw` is called for all combinations of one choice per control."""
    made = {"|".join(chosen): draw(*chosen) for chosen in product(*controls.values())}
    first = next(iter(made.values()))
    if len(made) == 1:
        return first
    told = [{"name": name, "choices": list(choices)} for name, choices in controls.items()]
    return {**first, "controls": told, "variants": made}


def numbers(values: ArrayLike, digits: int = 6) -> list[float | None]:
    """Round to `digits` digits; None for values that are not finite, because JSON has no NaN."""
    found = np.asarray(values, dtype=float).ravel().tolist()
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in found]


def said(value: float, stderr: float = math.nan) -> str:
    """Format a number rounded to its error, or to four digits; a dash for nan."""
    if not math.isfinite(value):
        return "–"
    return with_error(value, stderr) if stderr > 0 else rounded(value)


def in_interval(value: float, low: float, high: float) -> str:
    """`5.6, 95 % interval 3.9 to 19`: an estimate and its interval, if it has more than one probe."""
    if math.isnan(high) and math.isfinite(value):
        return f"{rounded(value, 2)} (one probe, no error)"
    if not low < high:
        return rounded(value)
    return f"{rounded(value, 2)}, 95 % interval {between(low, high, 2)}"


def power(value: float) -> str:
    """Format a tick: 0.01, 100, 10⁵, −10⁻⁴."""
    if value == 0:
        return "0"
    sign, exponent = "−" if value < 0 else "", round(math.log10(abs(value)))
    if -3 < exponent < 4:
        return f"{sign}{10.0**exponent:g}"
    return f"{sign}10<sup>{str(exponent).replace('-', '−')}</sup>"


class SignedLog(NamedTuple):
    """x ↦ asinh(x / 2c) / ln 10: linear below c, ± log₁₀(|x| / c) far beyond it."""

    linear: float

    def of(self, values: ArrayLike) -> np.ndarray:
        """Return the positions of values on the axis."""
        return np.arcsinh(np.asarray(values, dtype=float) / (2 * self.linear)) / math.log(10)

    def ticks(self, low: float, high: float, most: int = 4) -> dict[str, Any]:
        """Return ticks at zero and powers of ten from `low` to `high`, at most `most` per sign."""
        found = [0.0] if low <= 0 <= high else []
        for sign, end in ((-1.0, -low), (1.0, high)):
            if end > self.linear:
                first, last = math.ceil(math.log10(self.linear)), math.floor(math.log10(end) + 1e-9)
                kept = range(last, first, -max(1, math.ceil((last - first) / most)))
                found += [sign * 10.0**e for e in kept]
        found.sort()
        return {"tickvals": numbers(self.of(found)), "ticktext": [power(v) for v in found]}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with a title, a line and ticks; its margin grows with its labels."""
    found = {"title": {"text": symbols(title)}, "automargin": True, "zeroline": False, "ticks": "outside"}
    return {**found, "showline": True, "exponentformat": "power", **more}


def log_axis(title: str, values: ArrayLike) -> dict[str, Any]:
    """Return a logarithmic axis with ticks that do not overlap; linear if a value is not positive."""
    found = np.asarray(values, dtype=float)
    found = found[np.isfinite(found)]
    if not found.size or found.min() <= 0:
        return axis(title)
    decades = math.log10(found.max() / found.min())
    return axis(title, type="log", dtick="D2" if decades < 2.5 else max(1, round(decades / 6)))


def named(names: Sequence[str], *, most: int, title: str = "", **more: Any) -> dict[str, Any]:
    """Return an axis with names at 0, 1, 2, …; of more than `most`, every second, third, … is written."""
    step = max(1, math.ceil(len(names) / most))
    shown = list(range(0, len(names), step))
    ticks = {"tickvals": shown, "ticktext": [names[i] for i in shown], "range": [-0.5, len(names) - 0.5]}
    return axis(title, **ticks, **more) | {"ticks": "", "showgrid": False, "showline": False}


def nothing(words: str, height: int) -> Scene:
    """Return an empty scene with the reason as text."""
    note = {"text": symbols(words), "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
    hidden = {"visible": False}
    return {"data": [], "layout": {"height": height, "annotations": [note], "xaxis": hidden, "yaxis": hidden}}


DASH = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Curve:
    """Points of a curve with the text shown at each of them."""

    name: str
    x: np.ndarray  # (P,)
    y: np.ndarray  # (P,)
    words: Sequence[str] | str  # (P,), or one template with plotly's %{x}, %{y} and %{customdata}
    low: np.ndarray | None = None  # (P,) ends of intervals; nan if unknown
    high: np.ndarray | None = None
    look: Look | None = None
    marks: bool = True
    line: bool = True
    band: bool = False  # True: draw intervals as a band instead of bars
    of: str = ""  # name of the curve whose legend entry also toggles this one; "": its own entry
    true: np.ndarray | None = None  # (P,) values of %{customdata}: x before the transformation of the axis


def look_of(number: int) -> Look:
    """Look of the curve with this number, if it has no name of its own."""
    return Look(ON_SCREEN[number % len(ON_SCREEN)], DASH[number % len(DASH)], MARKS[number % len(MARKS)])


def curves(
    found: Sequence[Curve], *, x: dict[str, Any], y: dict[str, Any], height: int = 400, **layout: Any
) -> Scene:
    """Return a scene of curves on two axes (see `axis`), with a legend above them."""
    bands: list[Scene] = []  # drawn behind all curves
    traces: list[Scene] = []
    for number, curve in enumerate(found):
        look = curve.look or look_of(number)
        look = look._replace(color=on_screen(look.color))
        if curve.band and curve.low is not None and curve.high is not None:
            bands += _bands(curve, curve.low, curve.high, look, positive=y.get("type") == "log")
        traces.append(_trace(curve, look))
    legend = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
    base = {"height": height, "margin": {"l": 20, "r": 20, "t": 40, "b": 20}, "hovermode": "closest"}
    return {"data": [*bands, *traces], "layout": {**base, "legend": legend, "xaxis": x, "yaxis": y, **layout}}


def over(names: Sequence[str], title: str, most: int = 24) -> dict[str, Any]:
    """Return an axis of names at 0, 1, 2, …; if there are many, only every second, third, … is written."""
    step = max(1, math.ceil(len(names) / most))
    shown = list(range(0, len(names), step))
    return axis(title, tickvals=shown, ticktext=[names[i] for i in shown], range=[-0.4, len(names) - 0.6])


def _trace(curve: Curve, look: Look) -> Scene:
    mode = "+".join([*(["lines"] if curve.line else []), *(["markers"] if curve.marks else [])])
    trace: Scene = {
        "type": "scatter", "mode": mode, "name": symbols(curve.name), "legendgroup": curve.of or curve.name,
        "showlegend": not curve.of,
        "x": numbers(curve.x), "y": numbers(curve.y), **_hover(curve),
        "line": {"color": look.color, "width": 2, "dash": DASHES.get(look.dash, "solid")},
        "marker": {"color": look.color, "size": 7, "symbol": SYMBOLS.get(look.mark, look.mark)},
    }  # fmt: skip
    if curve.low is not None and curve.high is not None and not curve.band:
        up, down = (np.nan_to_num(np.maximum(e, 0.0)) for e in (curve.high - curve.y, curve.y - curve.low))
        bars = {"type": "data", "symmetric": False, "array": numbers(up), "arrayminus": numbers(down)}
        trace["error_y"] = {**bars, "thickness": 1.2, "width": 4}
    return trace


def _hover(curve: Curve) -> Scene:
    if not isinstance(curve.words, str):
        return {"text": [symbols(words) for words in curve.words], "hovertemplate": "%{text}<extra></extra>"}
    known = {} if curve.true is None else {"customdata": numbers(curve.true, 4)}
    return {"hovertemplate": f"{symbols(curve.words)}<extra></extra>", **known}


def _bands(curve: Curve, low: np.ndarray, high: np.ndarray, look: Look, *, positive: bool) -> list[Scene]:
    """Return a shaded polygon for every run of points with known intervals."""
    known = np.isfinite(low) & np.isfinite(high) & (high > low) & (high > 0 if positive else True)
    floor = float(np.min(high[known], initial=np.inf)) * 1e-3 if positive else -np.inf
    low = np.maximum(low, floor)
    stretches = np.split(np.arange(len(known)), np.flatnonzero(np.diff(known.astype(int))) + 1)
    found = []
    for part in stretches:
        if len(part) < 2 or not known[part[0]]:
            continue
        x = np.concatenate([curve.x[part], curve.x[part][::-1]])
        y = np.concatenate([high[part], low[part][::-1]])
        found.append({
            "type": "scatter", "mode": "lines", "x": numbers(x), "y": numbers(y), "fill": "toself",
            "fillcolor": see_through(look.color), "line": {"width": 0}, "hoverinfo": "skip",
            "showlegend": False, "legendgroup": curve.of or curve.name,
            "name": f"{curve.name}, 95 % interval",
        })  # fmt: skip
    return found


def see_through(color: str, share: float = 0.2) -> str:
    """`#1565a8` as a translucent rgba color."""
    r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r},{g},{b},{share:g})"
