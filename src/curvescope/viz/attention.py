"""Figures of an attention layer's Hessian: the whole and its two parts, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DECADES = 6  # shown below the largest value


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
        axes: where to draw, one Axes per panel; a new figure if None.
        names: what the blocks are called.
        sizes: rows of each block, in the order of `names`.
        panels: {title: square matrix of values ≥ 0 over all blocks}.
    """
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    if axes is None:
        width = 3.3 * len(panels) + 0.8
        grid = plt.subplots(1, len(panels), figsize=(width, 3.4), layout="constrained", squeeze=False)[1]
        axes = list(grid[0])
    values = np.concatenate([np.ravel(panel[np.isfinite(panel)]) for panel in panels.values()])
    top = float(values.max(initial=0.0)) or 1.0
    norm = LogNorm(vmin=top * 10.0**-DECADES, vmax=top)
    image = None
    for ax, (title, panel) in zip(axes, panels.items(), strict=True):
        drawn = np.ma.masked_less_equal(np.ma.masked_invalid(panel), 0)
        image = ax.imshow(drawn, norm=norm, cmap=style.MAP, interpolation="nearest")
        ax.set_title(title, fontsize=10)
        _mark_blocks(ax, names, sizes)
    if image is not None:
        axes[0].figure.colorbar(image, ax=list(axes), label=label, shrink=0.8)
    return axes


def _mark_blocks(ax: Axes, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Names in the middle of each block, lines where the next one begins."""
    stops = np.cumsum(sizes)
    centers = stops - np.asarray(sizes) / 2 - 0.5
    ax.set_xticks(centers, list(names))
    ax.set_yticks(centers, list(names))
    ax.tick_params(length=0)
    for stop in stops[:-1]:
        ax.axhline(stop - 0.5, color="0.35", lw=0.7)
        ax.axvline(stop - 0.5, color="0.35", lw=0.7)
