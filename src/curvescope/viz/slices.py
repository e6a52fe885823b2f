"""Figures of the loss along lines and on planes, with its Taylor predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS, COLORS = "0.1", {"quadratic": PALETTE[0], "cubic": PALETTE[1]}
STYLES = {"quadratic": "--", "cubic": ":"}
DASHED = "#ff8c69"  # color of the quadratic on a plane
LEVELS = 14


@style.in_style
def along(
    ax: Axes | None,
    t: np.ndarray,
    loss: np.ndarray,
    dense: np.ndarray,
    predictions: Mapping[str, np.ndarray],
    reach: Mapping[str, tuple[float, float]],
    *,
    title: str = "",
) -> Axes:
    """Draw the loss at t with its predictions at `dense`; bars at the bottom span where each holds.

    Points where the loss is not finite get a cross at the upper edge.
    """
    ax = _axes(ax, (5.6, 3.8))
    finite = np.isfinite(loss)
    low, high = (float(f(loss[finite])) for f in (np.min, np.max))
    room = (high - low) or abs(high) or 1.0
    ax.set_ylim(low - (0.12 + 0.05 * len(reach)) * room, high + 0.12 * room)
    ax.plot(t[finite], loss[finite], "-", color=LOSS, lw=1.1, marker=".", ms=4, label="loss")
    if not finite.all():
        top = np.full(int((~finite).sum()), high + 0.08 * room)
        ax.plot(t[~finite], top, "x", color=LOSS, ms=5, label="no finite loss")
    for name, values in predictions.items():
        ax.plot(dense, values, STYLES[name], color=COLORS[name], lw=1.6, label=name)
    for i, (name, (left, right)) in enumerate(reach.items()):
        y = low - (0.08 + 0.05 * i) * room
        ax.plot([left, right], [y, y], color=COLORS[name], lw=3, solid_capstyle="butt")
    ax.axvline(0, color="0.7", lw=0.6, zorder=0)
    ax.set(xlabel="t", title=title)
    ax.legend()
    return ax


@style.in_style
def errors(
    ax: Axes | None,
    t: np.ndarray,
    difference: Mapping[str, np.ndarray],
    allowed: np.ndarray,
    rounding: float,
    *,
    title: str = "",
) -> Axes:
    """Draw errors against |t| with the tolerance, logarithmic; filled for t > 0, hollow for t < 0."""
    ax = _axes(ax, (5.6, 3.8))
    away = t != 0
    order = np.argsort(np.abs(t[away]))
    x = np.abs(t[away])[order]
    ax.plot(x, allowed[away][order], "-", color="0.55", lw=1, label="allowed")
    shown = [allowed[away]]
    for name, found in difference.items():
        error = np.abs(found)
        for side, inside in ((1, COLORS[name]), (-1, "white")):
            here = (side * t > 0) & np.isfinite(error) & (error > 0)
            label = f"{name}, {'t > 0' if side > 0 else 't < 0'}"
            ax.plot(
                np.abs(t[here]),
                error[here],
                "o",
                color=COLORS[name],
                ms=3.5,
                mew=0.8,
                label=label,
                mfc=inside,
            )
            shown.append(error[here])
    values = np.concatenate(shown)
    values = values[values > 0]
    ax.set(xscale="log", yscale="log")
    if len(values):
        low, high = max(values.min(), rounding / 30, 1e-300) / 2, 3 * values.max()
        ax.set_ylim(low, high)
        if rounding > low:
            ax.axhspan(low, rounding, color="0.9", lw=0, zorder=0, label="rounding")
    _decades(ax)
    ax.set(xlabel="|t|", title=title or "error of the predictions")
    ax.legend(loc="lower right")
    return ax


@style.in_style
def plane(
    ax: Axes | None,
    a: np.ndarray,
    b: np.ndarray,
    loss: np.ndarray,
    quadratic: tuple[np.ndarray, np.ndarray, np.ndarray],
    verdicts: np.ndarray,
    *,
    names: Sequence[str] = ("u", "v"),
    title: str = "",
) -> Axes:
    """Draw the loss (A, B) as colors with lines of equal height, those of the quadratic dashed, at the same
    heights; dots where the quadratic holds (`verdicts` 1). White: no finite loss.

    `quadratic` is its own a, b and values, on a finer grid.
    """
    from matplotlib import patheffects
    from matplotlib.lines import Line2D

    ax = _axes(ax, (6.2, 5.0))
    shown = np.ma.masked_invalid(loss.T)
    levels = _levels(loss)
    colors = ax.contourf(a, b, shown, levels=levels, cmap="viridis", extend="both")
    ax.contour(a, b, shown, levels=levels[1:-1:2], colors="white", linewidths=0.8)
    lines = ax.contour(
        *quadratic[:2], quadratic[2].T, levels=levels[1:-1:2], colors=DASHED, linewidths=1.2, linestyles="--"
    )
    lines.set(path_effects=[patheffects.withStroke(linewidth=2.2, foreground="black", alpha=0.35)])
    x, y = np.meshgrid(a, b, indexing="ij")
    ax.plot(x[verdicts > 0], y[verdicts > 0], ".", color="white", ms=2.5)
    ax.plot(0, 0, "+", color="white", ms=10, mew=1.6)
    figure = ax.figure
    figure.colorbar(colors, ax=ax, label="loss", pad=0.02, format="%.3g")
    proxies = [Line2D([], [], color="white", lw=1), Line2D([], [], color=DASHED, lw=1.2, ls="--")]
    ax.legend(
        proxies, ["loss", "quadratic"], loc="lower left", frameon=True, facecolor="0.35", labelcolor="white"
    )
    ax.set(xlabel=f"a: {names[0]}", ylabel=f"b: {names[1]}", title=title)
    return ax


def _levels(loss: np.ndarray) -> np.ndarray:
    """Return levels between the smallest and the largest loss, without the largest few percent."""
    finite = loss[np.isfinite(loss)]
    low, high = float(finite.min()), float(np.percentile(finite, 95))
    return np.linspace(low, high if high > low else low + max(abs(low), 1.0), LEVELS + 1)


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    return style.axes(size) if ax is None else ax


def _decades(ax: Axes) -> None:
    """Set labels of a logarithmic x axis that do not overlap: 1, 2 and 5, or powers of ten on a long axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 300 * low else (1.0,)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
