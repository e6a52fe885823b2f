"""Figures of numbers per token at points of a model, colored text, and predictions against measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.viz import style
from curvescope.viz.trajectory import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 88  # characters per line of text
COLORS = style.MANY


@style.in_style
def quartiles(ax: Axes, names: Sequence[str], values: Sequence[np.ndarray], *, title: str) -> Axes:
    """Draw the median and the middle half of each point's numbers, in the order of the points."""
    low, middle, high = (np.array([np.percentile(v, q) for v in values]) for q in (25, 50, 75))
    x = np.arange(len(names))
    ax.fill_between(x, low, high, color=style.BLUE, alpha=0.2, lw=0)
    ax.plot(x, middle, color=style.BLUE, marker="o", ms=3.5, lw=1.4)
    if (low > 0).all():
        ax.set_yscale("log")
    else:
        most = max(float(np.abs([low, high]).max()), 1e-12)
        ax.set_yscale("symlog", linthresh=10.0 ** (np.floor(np.log10(most)) - 2))
        ax.axhline(0, color="0.6", lw=0.8)
    ax.set_xticks(x, names, rotation=60, ha="right", rotation_mode="anchor")
    ax.set_title(title)
    ax.grid(axis="y", color="0.92", lw=0.6)
    return ax


@style.in_style
def position_map(ax: Axes, values: np.ndarray, names: Sequence[str], *, label: str) -> Axes:
    """Draw a map with one row per point, the first at the bottom, and one column per position."""
    ax.set_facecolor("0.85")  # visible where a number is missing
    image = ax.imshow(values, aspect="auto", origin="lower", cmap=style.MAP, interpolation="nearest")
    ax.set_yticks(range(len(names)), names)
    ax.set_xlabel("position")
    ax.figure.colorbar(image, ax=ax, label=label, pad=0.02)
    return ax


@style.in_style
def colored_text(ax: Axes, tokens: Sequence[str], values: np.ndarray, *, title: str, label: str) -> Axes:
    """Draw tokens as running text on colors of a logarithmic scale; gray tokens have no positive value."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    positive = values[values > 0]
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (0.1, 1.0)
    norm, colors = LogNorm(low, high if high > low else 10 * low), colormaps[style.MAP]
    lines = wrapped(tokens)
    for row, line in enumerate(lines):
        column = 0
        for i in line:
            shown = short(tokens[i], 24)
            color: Any = colors(norm(values[i])) if values[i] > 0 else (0.85, 0.85, 0.85, 1.0)
            ax.add_patch(Rectangle((column, -row - 0.42), len(shown) - 0.1, 0.84, color=color, lw=0))
            ax.text(
                column + len(shown) / 2 - 0.05, -row, shown, family="monospace",
                color=style.ink(color), ha="center", va="center",
            )  # fmt: skip
            column += len(shown)
    ax.set(
        xlim=(-0.5, min(COLUMNS, sum(len(short(token, 24)) for token in tokens)) + 0.5),
        ylim=(-len(lines) + 0.4, 0.6),
    )
    ax.axis("off")
    ax.set_title(f"{title}: {label}")
    bar = ax.figure.colorbar(ScalarMappable(norm, colors), ax=ax, pad=0.01, aspect=8)
    ends = (float(norm.vmin or low), float(norm.vmax or high))
    bar.set_ticks(ends, labels=[f"{end:.2g}" for end in ends])
    bar.minorticks_off()
    return ax


def wrapped(tokens: Sequence[str]) -> list[list[int]]:
    """Break tokens into lines."""
    lines: list[list[int]] = [[]]
    used = 0
    for i, token in enumerate(tokens):
        width = len(short(token, 24))
        if used + width > COLUMNS and lines[-1]:
            lines.append([])
            used = 0
        lines[-1].append(i)
        used += width
    return lines


@style.in_style
def agreement(
    ax: Axes, predicted: np.ndarray, found: np.ndarray, kinds: Sequence[str], *, x: str, y: str
) -> Axes:
    """Draw predicted against measured values (D, A) by kind, with the line of agreement."""
    limit = max(float(np.abs([predicted, found]).max()), 1e-12)
    middle = max(np.median(np.abs(found)), 1e-3 * limit)
    decades = 10.0 ** np.arange(np.round(np.log10(middle)), np.log10(limit))
    ticks = [*-decades[::-1], 0.0, *decades]
    for color, kind in zip(COLORS, dict.fromkeys(kinds), strict=False):
        own = np.array([k == kind for k in kinds])
        ax.scatter(predicted[own], found[own], s=11, color=color, alpha=0.7, lw=0, label=kind)
    ax.plot([-limit, limit], [-limit, limit], color="0.5", lw=0.9, ls="--", zorder=0)
    for scale, marks in ((ax.set_xscale, ax.set_xticks), (ax.set_yscale, ax.set_yticks)):
        scale("symlog", linthresh=decades[0] if len(decades) else middle)
        marks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set(xlim=(-1.3 * limit, 1.3 * limit), ylim=(-1.3 * limit, 1.3 * limit), xlabel=x, ylabel=y)
    ax.legend(frameon=True, framealpha=1.0, edgecolor="none", loc="lower right", handletextpad=0.1)
    return ax


@style.in_style
def errors(ax: Axes, sizes: np.ndarray, shares: Mapping[str, Sequence[float]]) -> Axes:
    """Draw relative errors of predictions against the size of the step, both logarithmic."""
    for name, share in shares.items():
        ax.loglog(sizes, share, marker="o", ms=4, lw=1.3, label=name)
    ax.axhline(1, color="0.7", lw=0.8, ls=":")
    ax.set_xticks(sizes, [f"{a:g}" for a in sizes])
    ax.minorticks_off()
    ax.set(xlabel="|α|, in standard deviations", ylabel="error relative to the change")
    ax.legend(frameon=True, framealpha=1.0, edgecolor="none")
    return ax


@style.in_style
def part_bars(ax: Axes, names: Sequence[str], values: np.ndarray, stderr: np.ndarray) -> Axes:
    """Draw one bar per part, in order, colored by kind: head, feed-forward, other."""
    kinds = [
        "head" if ".h" in name else "feed-forward" if name.endswith(".ff") else "other" for name in names
    ]
    for color, kind in zip(COLORS, ("head", "feed-forward", "other"), strict=False):
        own = [i for i, k in enumerate(kinds) if k == kind]
        if own:
            ax.bar(
                own,
                values[own],
                yerr=np.nan_to_num(stderr[own]),
                color=color,
                label=kind,
                error_kw={"lw": 0.8},
            )
    ax.axhline(0, color="0.4", lw=0.8)
    ax.set_xticks(range(len(names)), names, rotation=90)
    ax.set(xlim=(-0.7, len(names) - 0.3), ylabel="contribution to the correct token's logit")
    ax.legend(frameon=True, framealpha=1.0, edgecolor="none")
    return ax
