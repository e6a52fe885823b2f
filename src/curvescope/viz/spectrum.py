"""Figures of spectra: densities of eigenvalues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DECADES = 8  # shown below the highest point of a logarithmic density


def density(
    ax: Axes | None,
    grid: np.ndarray,
    density: np.ndarray,
    stderr: np.ndarray | None = None,
    *,
    nodes: np.ndarray | None = None,
    log_y: bool = False,
    label: str | None = None,
) -> Axes:
    """Draw a spectral density as a line with a band of two standard errors; return the Axes.

    Args:
        ax: where to draw; a new figure if None.
        nodes: eigenvalues or Ritz values, marked by short ticks at the bottom.
        log_y: logarithmic density, eight decades down from its maximum.
    """
    if ax is None:
        import matplotlib.pyplot as plt

        ax = plt.subplots(figsize=(6, 3.5), layout="constrained")[1]
    low_before, high_before = ax.get_ylim() if ax.has_data() else (np.inf, 0.0)  # other curves stay in view
    (line,) = ax.plot(grid, density, lw=1.4, label=label)
    top = float(np.max(density))
    floor = top * 10.0**-DECADES if log_y else 0.0
    if stderr is not None and np.isfinite(stderr).all() and np.any(stderr > 0):
        low, high = np.maximum(density - 2 * stderr, floor), np.maximum(density + 2 * stderr, floor)
        ax.fill_between(grid, low, high, color=line.get_color(), alpha=0.25, lw=0)
        top = float(np.max(high))
    ax.set_yscale("log" if log_y else "linear")
    ax.set_ylim(min(floor, low_before), max(top * (2 if log_y else 1.05), high_before))
    if nodes is not None:
        heights = np.zeros(np.size(nodes))
        ax.plot(
            np.ravel(nodes), heights, "|", color=line.get_color(), ms=8, alpha=0.4,
            transform=ax.get_xaxis_transform(), clip_on=False,
        )  # fmt: skip
    ax.set_xlabel("eigenvalue λ")
    ax.set_ylabel("density of eigenvalues")
    ax.spines[["top", "right"]].set_visible(False)
    if label is not None:
        ax.legend(frameon=False)
    return ax
