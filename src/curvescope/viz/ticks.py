"""Ticks of logarithmic axes, and of those that are linear near zero."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW_DECADES = 2.0
SHORT = 300.0  # the range of an axis that powers of ten alone would leave with one or two labels


def plain_numbers(ax: Axes) -> None:
    """Where the logarithmic y axis spans few decades, ticks at 1, 2, 5 · 10ⁿ, written 0.02 and 50.

    To be called when everything is drawn: the range of the axis stays as it is.
    """
    low, high = ax.get_ylim()
    if not 0 < low < high or high / low > SHORT:
        return
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_yticks([], minor=True)
    ax.set_ylim(low, high)


def around_zero(ax: Axes, linear: float) -> None:
    """A y axis that is linear up to `linear`, a power of ten, and logarithmic beyond, with plain numbers.

    Ticks are 0 and powers of ten of both signs, and some between them where there are few decades; where all
    is linear, a few equal steps. To be called when everything is drawn: the range stays as it is.
    """
    from matplotlib.ticker import MaxNLocator

    ax.set_yscale("symlog", linthresh=linear)
    low, high = ax.get_ylim()
    decades = [max(math.log10(max(end, linear) / linear), 0.0) for end in (-low, high)]
    few = sum(decades) <= FEW_DECADES
    several, half = ((1, 2, 5), [linear / 2]) if few else ((1,), [])
    sizes = half + [m * linear * 10.0**e for e in range(math.ceil(max(decades)) + 1) for m in several]
    ticks = [0.0, *sizes, *(-size for size in sizes)]
    if not any(decades):
        ticks = [float(tick) for tick in MaxNLocator(5).tick_values(low, high)]
    inside = sorted(tick for tick in ticks if low <= tick <= high)
    ax.set_yticks(inside, [f"{tick:g}" for tick in inside])
    ax.set_yticks([], minor=True)
    ax.set_ylim(low, high)
