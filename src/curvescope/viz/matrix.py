"""Images of full matrices: every entry, or means over small cells, with lines between named blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

FLOOR = 1e-6  # colors are log10(|entry| + FLOOR)
LABEL = "log10(|entry| + 1e-6)"
GAP = 0.033  # gap between names of blocks, relative to the side


def colors(entries: np.ndarray) -> np.ndarray:
    """log10(|entry| + FLOOR)."""
    return np.log10(np.abs(entries) + FLOOR)


@style.in_style
def entries_map(
    ax: Axes, values: np.ndarray, names: Sequence[str], sizes: Sequence[int], limits: tuple[float, float]
) -> AxesImage:
    """Draw a square of colors with dashed lines between its blocks.

    Args:
        values: (n, n), from `colors`, or means of it over cells.
        sizes: Sizes of the blocks in pixels; they add up to n.
    """
    low, high = limits
    image = ax.imshow(values, vmin=low, vmax=high, cmap="viridis", interpolation="antialiased")
    mark_blocks(ax, names, sizes)
    return image


def mark_blocks(ax: Axes, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Draw dashed lines between blocks, and names in the middle of each, spread out if thin."""
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
            arrowprops=arrow,
        )  # fmt: skip
        ax.annotate(
            words, (center, 0), (place, -0.016), xycoords="axes fraction", ha="center", va="top",
            rotation=90, arrowprops=arrow,
        )  # fmt: skip


def apart(centers: np.ndarray, gap: float) -> np.ndarray:
    """Return positions in the same order, at least `gap` apart, as close to `centers` as one pass gets."""
    found = centers.copy()
    for i in range(1, len(found)):
        found[i] = max(found[i], found[i - 1] + gap)
    over = max(0.0, found[-1] - (1 - gap / 4))
    found[-1] -= over
    for i in reversed(range(len(found) - 1)):
        found[i] = min(found[i], found[i + 1] - gap)
    return found


DECADES = 6  # decades shown below the largest value


@style.in_style
def block_split(
    axes: Sequence[Axes] | None,
    names: Sequence[str],
    sizes: Sequence[int],
    panels: Mapping[str, np.ndarray],
    *,
    label: str = "size of the entries",
) -> Sequence[Axes]:
    """Draw heat maps side by side, one per panel, with lines between blocks; return their Axes.

    All panels share one logarithmic color scale, so that they can be compared; zeros and NaN stay white.

    Args:
        axes: One Axes per panel; a new figure if None.
        names: Names of the blocks.
        sizes: Rows of each block, in the order of `names`.
        panels: {title: square matrix of values ≥ 0 over all blocks}.
    """
    from matplotlib.colors import LogNorm

    if axes is None:
        width = 3.3 * len(panels) + 0.8
        grid = style.subplots(1, len(panels), figsize=(width, 3.4), squeeze=False)[1]
        axes = list(grid[0])
    values = np.concatenate([np.ravel(panel[np.isfinite(panel)]) for panel in panels.values()])
    top = float(values.max(initial=0.0)) or 1.0
    norm = LogNorm(vmin=top * 10.0**-DECADES, vmax=top)
    image = None
    for ax, (title, panel) in zip(axes, panels.items(), strict=True):
        drawn = np.ma.masked_less_equal(np.ma.masked_invalid(panel), 0)
        image = ax.imshow(drawn, norm=norm, cmap=style.MAP, interpolation="nearest")
        ax.set_title(title)
        _mark_blocks(ax, names, sizes)
    if image is not None:
        axes[0].figure.colorbar(image, ax=list(axes), label=label, shrink=0.8)
    return axes


def _mark_blocks(ax: Axes, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Write names in the middle of each block, and draw lines between blocks."""
    stops = np.cumsum(sizes)
    centers = stops - np.asarray(sizes) / 2 - 0.5
    ax.set_xticks(centers, list(names))
    ax.set_yticks(centers, list(names))
    ax.tick_params(length=0)
    for stop in stops[:-1]:
        ax.axhline(stop - 0.5, color="0.35", lw=0.7)
        ax.axvline(stop - 0.5, color="0.35", lw=0.7)
