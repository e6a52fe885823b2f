"""The figures of a diagnosis: every check against its limit, and layers, blocks and heads behind them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.diagnose.finding import Finding
from curvescope.studies.diagnose.tables import block_rows, head_rows, layer_rows
from curvescope.viz import blocks, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.diagnose.study import Diagnosis

COLORS = {
    "fault": "#b2182b",
    "warning": "#e08214",
    "note": "#2166ac",
    "fine": "#4d9221",
    "not looked at": "0.6",
}
LOW, HIGH = 1e-2, 1e2  # of the axis; beyond, a point stands at its edge
MOST_BLOCKS = 30


def draw(found: Diagnosis) -> dict[str, Figure]:
    """Those that the model has."""
    figures = {"checks": _checks(found)}
    if len(layer_rows(found)) > 1:
        figures["layers"] = _layers(found)
    if block_rows(found):
        figures["blocks"] = _blocks(found)
    if head_rows(found):
        figures["heads"] = _heads(found)
    return figures


def _checks(found: Diagnosis) -> Figure:
    """Value over limit, unusual to the right of the line."""
    import matplotlib.pyplot as plt

    shown = found.checks
    figure, ax = plt.subplots(figsize=(8.6, 1.1 + 0.34 * len(shown)), layout="constrained")
    for y, check in enumerate(shown):
        _row(ax, y, check)
    ax.axvline(1.0, color="0.3", lw=1)
    ax.axvspan(1.0, HIGH * 1.6, color="0.95", zorder=0)
    ax.set(xscale="log", xlim=(LOW / 1.6, HIGH * 1.6), ylim=(len(shown) - 0.4, -0.6))
    ax.set_yticks(range(len(shown)), [check.name.replace("_", " ") for check in shown], fontsize=9)
    for label, check in zip(ax.get_yticklabels(), shown, strict=True):
        label.set_color(COLORS[check.severity])
    ax.set_xlabel("value over limit: usual left of the line, unusual right of it")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    _legend(figure, [check.severity for check in shown])
    return figure


def _row(ax: Axes, y: int, check: Finding) -> None:
    """A point with its error, and the number itself at the right."""
    color = COLORS[check.severity]
    middle, low, high = _places(check)
    if not math.isnan(middle):
        marker = ">" if middle >= HIGH else "<" if middle <= LOW else "o"
        error = [[max(middle - low, 0.0)], [max(high - middle, 0.0)]]
        ax.errorbar([middle], [y], xerr=error, fmt=marker, color=color, ms=6, lw=1.2, capsize=2)
    words = "not looked at" if check.severity == "not looked at" else f"{check.number}  {check.unit}"
    ax.annotate(
        words,
        (1.01, y),
        xycoords=("axes fraction", "data"),
        va="center",
        fontsize=8,
        color=color if check.found else "0.35",
    )


def _places(check: Finding) -> tuple[float, float, float]:
    """Where value and its ends stand on the axis; a limit of zero has its value at one edge or the other."""
    if check.limit == 0:
        edge = HIGH if check.value > 0 else LOW
        return edge, edge, edge
    middle, low, high = (float(np.clip(x, LOW, HIGH)) for x in check.excess)
    return middle, low, high


def _legend(figure: Figure, severities: list[str]) -> None:
    from matplotlib.lines import Line2D

    kinds = [kind for kind in COLORS if kind in severities]
    handles = [Line2D([], [], marker="o", ls="", color=COLORS[kind], label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(kinds), frameon=False, fontsize=9)


def _layers(found: Diagnosis) -> Figure:
    """Curvature and gradient of each layer."""
    import matplotlib.pyplot as plt

    rows = layer_rows(found)
    names = [str(row["layer"]) for row in rows]
    x = np.arange(len(rows))
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.0), layout="constrained")
    series = {"rows_norm": "norm of the Hessian's rows", "gradient_norm": "norm of the gradient"}
    for ax, (key, label) in zip(axes, series.items(), strict=True):
        values = np.array([row[key] for row in rows], dtype=float)
        error = np.array([row.get(f"{key}_stderr", 0.0) for row in rows], dtype=float)
        ax.errorbar(x, values, yerr=np.minimum(error, 0.99 * values), fmt="o-", color=style.BLUE, lw=1, ms=5)
        ax.axhline(np.median(values), color="0.6", lw=0.8, ls="--")
        ax.set_yscale("log")
        span = max(float(np.nanmax(values) / np.nanmin(values)), 10.0) ** 0.15
        ax.set_ylim(float(np.nanmin(values)) / span / 1.5, float(np.nanmax(values)) * span * 1.5)
        step = max(1, len(x) // 12)
        ax.set_xticks(x[::step], names[::step])
        ax.set_title(label, fontsize=10, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def _blocks(found: Diagnosis) -> Figure:
    """λ_max of the sharpest matrices, with the bound from above."""
    import matplotlib.pyplot as plt

    rows = block_rows(found)[:MOST_BLOCKS]
    top, high = (np.array([row[key] for row in rows], dtype=float) for key in ("lambda_max", "high"))
    figure, ax = plt.subplots(figsize=(2.5 + 0.24 * len(rows), 3.8), layout="constrained")
    named = {"λ_max, with its bound from above": (top, top, np.maximum(high, top))}
    blocks.bars(ax, [str(row["block"]) for row in rows], named, label="λ_max of the block")
    return figure


def _heads(found: Diagnosis) -> Figure:
    """Three maps, layer × head."""
    import matplotlib.pyplot as plt

    rows = head_rows(found)
    L, h = 1 + int(rows[-1]["layer"]), 1 + int(rows[-1]["number"])
    panels = {
        "liveness": ("liveness", 0.0, 1.0),
        "first_token": ("weight on the first token", 0.0, 1.0),
        "written": ("written, over the median head", 0.0, None),
    }
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 1.5 + 0.3 * min(L, 24)), layout="constrained")
    for ax, (key, (title, low, high)) in zip(axes, panels.items(), strict=True):
        values = np.array([row[key] for row in rows], dtype=float).reshape(L, h)
        image = ax.imshow(values, vmin=low, vmax=high, cmap=style.MAP, aspect="auto")
        _numbers(ax, values, image)
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_xticks(range(h)[:: max(1, h // 12)])
        ax.set_yticks(range(L)[:: max(1, L // 12)])
        ax.set(xlabel="head", ylabel="layer")
        figure.colorbar(image, ax=ax)
    return figure


def _numbers(ax: Axes, values: np.ndarray, image: Any) -> None:
    """Written into the cells where they have room."""
    if values.shape[1] > 8 or values.shape[0] > 16:
        return
    for (i, j), value in np.ndenumerate(values):
        if math.isfinite(value):
            color = style.ink_at(image, value)
            ax.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=7, color=color)
