"""What all scenes share: switches, numbers, axes, and a logarithm that keeps signs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from curvescope.core.numbers import rounded, with_error
from curvescope.viz.interactive import Scene
from curvescope.viz.style import SUBSCRIPT

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
SYMBOLS = {"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down"}


def symbols(text: str) -> str:
    """Subscripts of words as HTML: λ_max to λ<sub>max</sub>."""
    return SUBSCRIPT.sub(r"\1<sub>\2</sub>", text)


def switched(controls: Mapping[str, Sequence[str]], draw: Callable[..., Scene]) -> Scene:
    """A scene with switches: `draw` is called with one choice of every control, for all combinations."""
    made = {"|".join(chosen): draw(*chosen) for chosen in product(*controls.values())}
    first = next(iter(made.values()))
    if len(made) == 1:
        return first
    told = [{"name": name, "choices": list(choices)} for name, choices in controls.items()]
    return {**first, "controls": told, "variants": made}


def numbers(values: ArrayLike, digits: int = 6) -> list[float | None]:
    """So many digits, None for what is not finite: JSON has no NaN."""
    found = np.asarray(values, dtype=float).ravel().tolist()
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in found]


def said(value: float, stderr: float = math.nan) -> str:
    """A number rounded to its error, or four digits of it; a dash where there is none."""
    if not math.isfinite(value):
        return "–"
    return with_error(value, stderr) if stderr > 0 else rounded(value)


def estimated(value: float, stderr: float) -> str:
    """An estimate with its standard error; one from a single probe has none, and two digits."""
    if math.isnan(stderr) and math.isfinite(value):
        return f"{rounded(value, 2)} (one probe, no error)"
    return said(value, stderr)


def power(value: float) -> str:
    """A tick: 0.01, 100, 10⁵, −10⁻⁴."""
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
        """Places of values on the axis."""
        return np.arcsinh(np.asarray(values, dtype=float) / (2 * self.linear)) / math.log(10)

    def ticks(self, low: float, high: float, most: int = 4) -> dict[str, Any]:
        """Zero and powers of ten from `low` to `high`, at most so many on a side, with their true values."""
        found = [0.0] if low <= 0 <= high else []
        for sign, end in ((-1.0, -low), (1.0, high)):
            if end > self.linear:
                first, last = math.ceil(math.log10(self.linear)), math.floor(math.log10(end) + 1e-9)
                kept = range(last, first, -max(1, math.ceil((last - first) / most)))
                found += [sign * 10.0**e for e in kept]
        found.sort()
        return {"tickvals": numbers(self.of(found)), "ticktext": [power(v) for v in found]}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title, a line and ticks; its margin grows with its labels."""
    found = {"title": {"text": symbols(title)}, "automargin": True, "zeroline": False, "ticks": "outside"}
    return {**found, "showline": True, "exponentformat": "power", **more}


def log_axis(title: str, values: ArrayLike) -> dict[str, Any]:
    """A logarithmic axis for these values, with ticks that do not touch; linear where one is not positive."""
    found = np.asarray(values, dtype=float)
    found = found[np.isfinite(found)]
    if not found.size or found.min() <= 0:
        return axis(title)
    decades = math.log10(found.max() / found.min())
    return axis(title, type="log", dtick="D2" if decades < 2.5 else max(1, round(decades / 6)))


def named(names: Sequence[str], *, most: int, title: str = "", **more: Any) -> dict[str, Any]:
    """An axis with a name at 0, 1, 2, …; of more than `most` every second, third, … is written."""
    step = max(1, math.ceil(len(names) / most))
    shown = list(range(0, len(names), step))
    ticks = {"tickvals": shown, "ticktext": [names[i] for i in shown], "range": [-0.5, len(names) - 0.5]}
    return axis(title, **ticks, **more) | {"ticks": "", "showgrid": False, "showline": False}


def nothing(words: str, height: int) -> Scene:
    """A scene that says why there is nothing in it."""
    note = {"text": symbols(words), "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
    hidden = {"visible": False}
    return {"data": [], "layout": {"height": height, "annotations": [note], "xaxis": hidden, "yaxis": hidden}}
