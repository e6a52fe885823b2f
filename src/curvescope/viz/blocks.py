"""Figures of blocks: heat maps of all pairs, bars of one number per block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.viz import style
from curvescope.viz.style import MARKS, PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL = 8.0  # points
NOTHING = 1e-200  # if all values are below this, a logarithmic axis would overflow
Interval = tuple[np.ndarray, np.ndarray, np.ndarray]  # values and the ends of their intervals


@style.in_style
def heat_map(
    ax: Axes | None,
    names: Sequence[str],
    values: np.ndarray,
    *,
    label: str = "",
    limits: tuple[float, float] | None = None,
    color_bar: bool = True,
) -> Axes:
    """Draw a positive matrix of one number per pair of blocks, colors logarithmic; zeros stay white.

    Args:
        limits: smallest and largest value of the colors; by default six decades below the largest.
    """
    from matplotlib.colors import LogNorm

    if ax is None:
        side = 2.2 + 0.17 * len(names)
        ax = style.axes((side + 0.8, side))
    top = float(values.max()) if values.size and values.max() > 0 else 1.0
    smallest = float(values[values > 0].min()) if (values > 0).any() else top / 10
    low, high = limits or (max(smallest, top * 1e-6), top)
    norm = LogNorm(vmin=low, vmax=max(high, low * 10))
    image = ax.imshow(np.ma.masked_less_equal(values, 0), norm=norm, cmap=style.MAP, interpolation="nearest")
    label_blocks(ax, names)
    _rule_between_layers(ax, names)
    if color_bar:
        ax.figure.colorbar(image, ax=ax, label=label, shrink=0.8)
    return ax


@style.in_style
def bars(
    ax: Axes | None,
    names: Sequence[str],
    series: Mapping[str, Interval],
    *,
    label: str = "",
    log: bool = True,
    outer: Mapping[str, tuple[np.ndarray, ...]] | None = None,
) -> Axes:
    """Draw one point with its interval per block and series; nan: no bar.

    Args:
        ax: The axes, or None for new ones.
        names: The blocks.
        series: For each series the values and both ends of their numerical intervals.
        label: Label of the vertical axis.
        log: If True, the vertical axis is logarithmic.
        outer: For each series both ends of thin bars, the intervals from both errors.
    """
    ax = style.axes((2.5 + 0.2 * len(names), 3.4)) if ax is None else ax
    x = np.arange(len(names))
    for i, (name, (values, low, high)) in enumerate(series.items()):
        shift = 0.18 * (i - (len(series) - 1) / 2)
        errors = style.error_bars(values, low, high)
        look = {
            "fmt": MARKS[i % len(MARKS)],
            "ms": 3.5,
            "lw": 1,
            "color": PALETTE[i % len(PALETTE)],
            "label": name,
        }
        if outer is not None and name in outer:
            wide = style.error_bars(values, *outer[name])
            thin = {"fmt": "none", "ecolor": look["color"], "elinewidth": 0.7, "capsize": 2, "capthick": 0.7}
            ax.errorbar(x + shift, values, yerr=wide, **thin)
            look["lw"] = 2.5
        ax.errorbar(x + shift, values, yerr=errors, **look)
    top = max((float(np.abs(values).max(initial=0.0)) for values, *_ in series.values()), default=0.0)
    if log and top > NOTHING:
        smallest = 10.0 ** math.ceil(math.log10(top * 1e-4))  # a tick well away from zero
        lowest = min(float(np.nanmin(np.fmin(values, low))) for values, low, _ in series.values())
        if lowest >= smallest:  # no value is near zero
            ax.set_yscale("log")
        else:
            ax.set_yscale("symlog", linthresh=smallest)
    ax.axhline(0, color="0.6", lw=0.6)
    ax.set_xticks(x, list(names), rotation=90, **style.fitting(len(names)))
    ax.set(xlim=(-0.7, len(names) - 0.3), ylabel=label)
    ax.grid(axis="x", lw=0.3, color="0.9")
    ax.legend(
        ncols=len(series),
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0,
    )
    return ax


def largest(values: Sequence[float]) -> float:
    """Return the largest absolute value, for a logarithmic axis or color scale; 1 if all values are zero."""
    found = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return found if found > NOTHING else 1.0


def label_blocks(ax: Axes, names: Sequence[str]) -> None:
    """Write names along both sides of a square map, 8 points high: of all blocks, or of layers if block
    names would overlap. Two layers whose names would overlap share one, `E, P`; if there are too many,
    only every second, third, … is named.
    """
    box = ax.get_position()
    width, height = ax.figure.get_size_inches()  # pyright: ignore[reportAttributeAccessIssue]
    # In points; names and color bars take a fifth.
    side = 72 * 0.8 * min(box.width * width, box.height * height)
    gap = (LABEL + 2) / side * len(names)  # number of blocks between names
    groups = [([name], float(i)) for i, name in enumerate(names)]
    if gap > 1:
        layers = [name.split(".")[0] for name in names]
        groups = []
        for layer in dict.fromkeys(layers):
            place = layers.index(layer) + (layers.count(layer) - 1) / 2
            if groups and place - groups[-1][1] < gap and len(groups[-1][0]) < 2:
                groups[-1] = [*groups[-1][0], layer], (groups[-1][1] + place) / 2
            else:
                groups.append(([layer], place))
    groups = groups[:: max(1, math.ceil(len(groups) * gap / len(names)))]
    places, words = [place for _, place in groups], [", ".join(group) for group, _ in groups]
    ax.set_xticks(places, words, rotation=90)
    ax.set_yticks(places, words)


def cell_text(value: float) -> str:
    """Format a value with three digits or more, in at most eight characters.

    1435, 13.1, 0.0314, 1.44e6, -3.2e-5.
    """
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 999.5 <= size < 99999.5:
        return f"{value:.0f}"
    if 9.995e-3 <= size < 999.5:
        return f"{float(f'{value:.3g}'):g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def color_ticks(norm: Any, most: int = 5) -> list[float]:
    """Return powers of ten for a color bar, few enough not to overlap, with zero for signed scales."""
    low = norm.linthresh if norm.vmin < 0 else norm.vmin
    exponents = np.arange(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(norm.vmax) + 1e-9) + 1)
    room = max(1, (most - 1) // 2) if norm.vmin < 0 else most
    kept = exponents[::-1][:: max(1, -(-len(exponents) // room))][::-1]
    powers = [10.0 ** int(e) for e in kept]
    return [*(-p for p in reversed(powers)), 0.0, *powers] if norm.vmin < 0 else powers


def _rule_between_layers(ax: Axes, names: Sequence[str]) -> None:
    """Draw thin lines between layers."""
    layers = [name.split(".")[0] for name in names]
    for i in range(1, len(layers)):
        if layers[i] != layers[i - 1]:
            ax.axhline(i - 0.5, color="white", lw=0.8)
            ax.axvline(i - 0.5, color="white", lw=0.8)
