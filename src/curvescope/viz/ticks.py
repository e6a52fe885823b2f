"""Ticks of logarithmic axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
