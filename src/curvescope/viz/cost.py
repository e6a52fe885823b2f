"""Time and memory of several contenders, as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from curvescope.core.parts import MATRICES
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, OTHERS = style.BLUE, "0.72"
_OWN = ("gradient", *MATRICES)


def bars(
    names: Sequence[str], ratios: Sequence[tuple[float, float, float]], memory: Sequence[float] | None
) -> Figure:
    """Horizontal bars of time in gradients (median, with a line from least to most), and of peak GiB.

    Names of our own contenders begin with gradient or the name of a matrix. Memory that is nan has no bar.
    """
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, 1 if memory is None else 2, figsize=(8, 0.45 * len(names) + 1.4), sharey=True, squeeze=False
    )
    colours = [OURS if name.replace(",", "").split()[0] in _OWN else OTHERS for name in names]
    rows = range(len(names))
    left = axes[0, 0]
    left.barh(rows, [m for m, _, _ in ratios], color=colours)
    left.hlines(rows, [low for _, low, _ in ratios], [high for _, _, high in ratios], color="black", lw=1)
    left.set_yticks(rows, names)
    left.invert_yaxis()
    left.set_xlabel("time of one product, in gradients")
    left.axvline(1, color="black", lw=0.6, ls=":")
    for row, (median, _, high) in zip(rows, ratios, strict=True):
        left.annotate(
            f"{median:.2f}", (max(median, high), row), (4, 0), textcoords="offset points", va="center"
        )
    left.margins(x=0.12)
    if memory is not None:
        right = axes[0, 1]
        right.barh(rows, memory, color=colours)
        right.set_xlabel("peak memory, GiB")
        right.margins(x=0.15)
        for row, amount in zip(rows, memory, strict=True):
            if amount == amount:
                right.annotate(
                    f"{amount:.1f}", (amount, row), (4, 0), textcoords="offset points", va="center"
                )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


Line = Sequence[tuple[float, float, float, float]]
"""Points of a curve: x, the value, and its range."""


def over_lengths(panels: Mapping[str, Mapping[tuple[str, str], Line]], *, ratios: bool) -> Figure:
    """A panel for each computation: curves over the length, contenders by hue and mark, masks by dash.

    Args:
        panels: By title; curves by contender and mask.
        ratios: Values are ratios, with a line at 1; else memory in MB, with a line that the length is.
    """
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    names = list(
        dict.fromkeys(name for curves in panels.values() for (name, _), line in curves.items() if line)
    )
    masks = list(
        dict.fromkeys(mask for curves in panels.values() for (_, mask), line in curves.items() if line)
    )
    looks = {
        name: (OURS if name == "ours" else style.MANY[1 + i], style.MARKS[i % 5])
        for i, name in enumerate(names)
    }
    figure, grid = plt.subplots(2, 2, figsize=(8.2, 6.2), sharex=True, layout="constrained")
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=True):
        for (name, mask), line in curves.items():
            if not line:
                continue
            x, y, low, high = zip(*line, strict=True)
            hue, mark = looks[name]
            axes.plot(x, y, color=hue, marker=mark, ls="-" if mask == masks[0] else "--", ms=4)
            if ratios:
                axes.vlines(x, low, high, color=hue, lw=0.8)
        if ratios:
            axes.axhline(1, color="black", lw=0.6, ls=":")
        else:
            _proportional(axes, curves)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(
            lambda value, _: f"{value:g}" if ratios and f"{value:.0e}"[0] in "25" else ""
        )
    for axes in grid[1]:
        axes.set_xlabel("length (tokens)")
    for axes in grid[:, 0]:
        axes.set_ylabel("time, in that of the math path" if ratios else "peak memory (MB)")
    marks = [Line2D([], [], color=looks[n][0], marker=looks[n][1], label=n) for n in names]
    kinds = [
        Line2D([], [], color="0.4", ls=ls, label=m if m != "none" else "no mask")
        for m, ls in zip(masks, ("-", "--"), strict=False)
    ]
    figure.legend(handles=[*marks, *kinds], loc="outside lower center", ncols=len(marks) + len(kinds))
    return figure


def _proportional(axes: Axes, curves: Mapping[tuple[str, str], Line]) -> None:
    """A dotted line proportional to the length, through the last point of our curve."""
    ours = next((line for (name, _), line in curves.items() if name == "ours" and line), None)
    if ours:
        x, y = [point[0] for point in ours], ours[-1][1] / ours[-1][0]
        axes.plot(x, [y * length for length in x], color="black", lw=0.8, ls=":")
