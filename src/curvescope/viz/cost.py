"""Time and memory of several contenders, as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from curvescope.core.parts import MATRICES
from curvescope.viz import style

if TYPE_CHECKING:
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


def over_lengths(
    panels: Mapping[str, Mapping[tuple[str, str], Line]],
    names: Sequence[str],
    *,
    label: str,
    reference: Sequence[tuple[float, float]],
    words: str,
) -> Figure:
    """A panel for each of four computations: curves over the length.

    Args:
        panels: By title; curves by contender and mask.
        names: Of contenders, which have hues and marks in this order; masks have dashes.
        label: Of the values.
        reference: Points (x, value) of a dotted line in every panel.
        words: What that line is.
    """
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    drawn = {key for curves in panels.values() for key, line in curves.items() if line}
    looks = {name: (style.MANY[i], style.MARKS[i % len(style.MARKS)]) for i, name in enumerate(names)}
    dashes = dict(
        zip(
            dict.fromkeys(mask for curves in panels.values() for _, mask in curves), ("-", "--"), strict=False
        )
    )
    figure, grid = plt.subplots(2, 2, figsize=(8.2, 6.2), sharex=True, sharey=True, layout="constrained")
    for axes, (title, curves) in zip(grid.flat, panels.items(), strict=True):
        axes.plot(*zip(*reference, strict=True), color="black", lw=0.8, ls=":")
        for (name, mask), line in curves.items():
            if not line:
                continue
            x, y, low, high = zip(*line, strict=True)
            hue, mark = looks[name]
            axes.plot(x, y, color=hue, marker=mark, ls=dashes[mask], ms=4)
            axes.vlines(x, low, high, color=hue, lw=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if value < 10 and _leads(value) else "")
    for axes in grid[1]:
        axes.set_xlabel("length (tokens)")
    for axes in grid[:, 0]:
        axes.set_ylabel(label)
    marks = [
        Line2D([], [], color=looks[name][0], marker=looks[name][1], label=name)
        for name in names
        if any(key[0] == name for key in drawn)
    ]
    kinds = [
        Line2D([], [], color="0.4", ls=ls, label="no mask" if mask == "none" else mask)
        for mask, ls in dashes.items()
        if any(key[1] == mask for key in drawn)
    ]
    dotted = Line2D([], [], color="black", lw=0.8, ls=":", label=words)
    figure.legend(handles=[*marks, *kinds, dotted], loc="outside lower center", ncols=4)
    return figure


def _leads(value: float) -> bool:
    """Whether the first digit of a number is 2 or 5."""
    return f"{value:.0e}"[0] in "25"
