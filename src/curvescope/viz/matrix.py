"""Pictures of whole matrices: every entry, or small cells of them, with lines between named blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

FLOOR = 1e-6  # colors are log10(|entry| + FLOOR)
LABEL = "log10(|entry| + 1e-6)"
GAP = 0.033  # between the names of blocks, as a share of the side


def colors(entries: np.ndarray) -> np.ndarray:
    """log10(|entry| + FLOOR)."""
    return np.log10(np.abs(entries) + FLOOR)


def entries_map(
    ax: Axes, values: np.ndarray, names: Sequence[str], sizes: Sequence[int], limits: tuple[float, float]
) -> AxesImage:
    """Draw a square of colors with dashed lines between its blocks.

    Args:
        values: (n, n), what `colors` gave, or means of it over cells.
        sizes: of the blocks, in pixels; they add up to n.
    """
    low, high = limits
    image = ax.imshow(values, vmin=low, vmax=high, cmap="viridis", interpolation="antialiased")
    mark_blocks(ax, names, sizes)
    return image


def mark_blocks(ax: Axes, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Dashed lines between blocks; names in the middle of each, those of slivers pulled apart."""
    stops = np.cumsum(sizes)
    for stop in stops[:-1]:
        ax.axhline(stop - 0.5, color="white", ls=(0, (4, 3)), lw=0.7, alpha=0.8)
        ax.axvline(stop - 0.5, color="white", ls=(0, (4, 3)), lw=0.7, alpha=0.8)
    ax.set_xticks([])
    ax.set_yticks([])
    total = float(stops[-1])
    where = apart((stops - np.asarray(sizes) / 2) / total, GAP)
    for name, center, place in zip(names, (stops - np.asarray(sizes) / 2) / total, where, strict=True):
        arrow = {"arrowstyle": "-", "lw": 0.6, "color": "0.4", "shrinkA": 0, "shrinkB": 0}
        words = name.removeprefix("L0.")
        ax.annotate(
            words, (0, 1 - center), (-0.016, 1 - place), xycoords="axes fraction", ha="right", va="center",
            fontsize=10, arrowprops=arrow,
        )  # fmt: skip
        ax.annotate(
            words, (center, 0), (place, -0.016), xycoords="axes fraction", ha="center", va="top",
            fontsize=10, rotation=90, arrowprops=arrow,
        )  # fmt: skip


def apart(centers: np.ndarray, gap: float) -> np.ndarray:
    """Positions in the same order, at least `gap` from each other, as near to `centers` as one pass gets."""
    found = centers.copy()
    for i in range(1, len(found)):
        found[i] = max(found[i], found[i - 1] + gap)
    over = max(0.0, found[-1] - (1 - gap / 4))
    found[-1] -= over
    for i in reversed(range(len(found) - 1)):
        found[i] = min(found[i], found[i + 1] - gap)
    return found
