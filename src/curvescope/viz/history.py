"""Figures over the steps of a training run: lines with errors, limits, maps of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz import style
from curvescope.viz.blocks import cell_text, color_ticks
from curvescope.viz.style import MAP, SIGNED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DECADES, SIGNED_DECADES = 6, 4  # range of the colors of a map below its largest value
CROWDED = 40  # a line with more points has no markers


def panels(count: int, *, height: float = 2.9) -> tuple[Figure, Sequence[Axes]]:
    """Create a figure with panels side by side."""
    figure, axes = style.subplots(1, count, figsize=(4.3 * count, height), squeeze=False)
    for ax in axes[0]:
        ax.grid(lw=0.3, color="0.9")
        ax.set_xlabel("step")
    return figure, list(axes[0])


def line(
    ax: Axes,
    steps: np.ndarray,
    values: np.ndarray,
    errors: np.ndarray | None = None,
    *,
    label: str,
    color: str,
    style: str = "-",
) -> bool:
    """Draw a line through the measured values with a band of errors; return False if there are none."""
    there = np.isfinite(values)
    if not there.any():
        return False
    x, y = steps[there], values[there]
    mark = "o" if len(x) <= CROWDED and style == "-" else ""
    ax.plot(x, y, ls=style, marker=mark, ms=2.5, lw=1.3, color=color, label=label)
    if errors is not None:
        e = np.nan_to_num(errors[there])
        ax.fill_between(x, y - e, y + e, color=color, alpha=0.25, lw=0)
    return True


def positive(ax: Axes, *values: np.ndarray) -> None:
    """Use a logarithmic axis if all finite values are positive and span more than a decade."""
    found = np.concatenate([v[np.isfinite(v)] for v in values])
    if found.size and found.min() > 0 and found.max() > 10 * found.min():
        ax.set_yscale("log")


@style.in_style
def step_map(ax: Axes, steps: np.ndarray, names: Sequence[str], values: np.ndarray, *, label: str) -> None:
    """Draw rows of blocks (B, S) over steps with logarithmic colors, on both sides of zero if there are
    signs. Unknown values stay white. A column is as wide as the time until the next one.
    """
    from matplotlib.colors import LogNorm, SymLogNorm

    known = values[np.isfinite(values)]
    signed = bool((known < 0).any())
    good = np.abs(known) if signed else known[known > 0]
    top = float(good.max(initial=0.0)) or 1.0
    low = max(float(good.min(initial=top)), top * 10.0**-DECADES)
    norm = LogNorm(vmin=low, vmax=max(top, low * 10))
    if signed:
        norm = SymLogNorm(top * 10.0**-SIGNED_DECADES, vmin=-top, vmax=top)
    shown = np.ma.masked_invalid(values if signed else np.where(values > 0, values, np.nan))
    width = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    edges = np.append(steps, steps[-1] + width)
    image = ax.pcolormesh(
        edges, np.arange(len(names) + 1) - 0.5, shown, norm=norm, cmap=SIGNED if signed else MAP
    )
    ax.set_ylim(len(names) - 0.5, -0.5)
    every = max(1, -(-len(names) // 40))
    ax.set_yticks(range(0, len(names), every), [*names][::every])
    ax.grid(visible=False)
    ticks = [] if signed else color_ticks(norm)
    bar = ax.figure.colorbar(image, ax=ax, label=label, shrink=0.8)
    if len(ticks) > 1:
        bar.set_ticks(ticks, labels=[cell_text(tick) for tick in ticks])
        bar.ax.minorticks_off()
