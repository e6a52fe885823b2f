"""Figures of single estimates: samples around their mean, extreme eigenvalues, entries of a diagonal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 2000  # of a sorted curve: more cannot be told apart on a screen


def samples(
    ax: Axes | None, found: np.ndarray, value: float, interval: tuple[float, float], *, label: str
) -> Axes:
    """Draw one point per probe, a line at the estimate and a band over its interval, where it is finite."""
    ax = _axes(ax)
    low, high = interval
    if np.isfinite(low) and np.isfinite(high):
        ax.axhspan(low, high, alpha=0.2, color=style.BLUE, lw=0, label="95 % interval")
    ax.axhline(value, color=style.BLUE, lw=1.2, label="estimate")
    ax.plot(np.arange(1, len(found) + 1), found, "o", ms=3.5, color="0.35", label="one probe")
    ax.set_xlabel("probe")
    ax.set_ylabel(label)
    ax.locator_params(axis="x", integer=True)
    ax.legend(frameon=False, fontsize=8)
    return ax


def eigenvalues(ax: Axes | None, values: np.ndarray, errors: np.ndarray, converged: np.ndarray) -> Axes:
    """Draw eigenvalues by number with their residuals; those that are not converged are hollow."""
    ax = _axes(ax)
    numbers = np.arange(1, len(values) + 1)
    ax.axhline(0, color="0.6", lw=0.6)
    for shown, fill, words in ((converged, style.BLUE, "converged"), (~converged, "none", "not converged")):
        if shown.any():
            look = {"fmt": "o", "ms": 4.5, "lw": 1, "color": style.BLUE, "mfc": fill, "label": words}
            ax.errorbar(numbers[shown], values[shown], yerr=errors[shown], **look)
    ax.set_xlabel("number")
    ax.set_ylabel("eigenvalue λ")
    ax.locator_params(axis="x", integer=True)
    ax.legend(frameon=False, fontsize=8)
    return ax


def entries(ax: Axes | None, values: np.ndarray, *, label: str) -> Axes:
    """Draw entries from the largest to the smallest against their share; both signs on a symlog axis."""
    ax = _axes(ax)
    share = np.linspace(0, 100, min(len(values), POINTS))
    curve = np.sort(values)[::-1][np.round(np.linspace(0, len(values) - 1, len(share))).astype(int)]
    top = float(np.abs(curve).max(initial=0.0))
    ax.plot(share, curve, lw=1.4)
    if top > 1e-200:  # below it a logarithmic axis overflows
        ax.set_yscale("symlog", linthresh=1e-4 * top)
    ax.axhline(0, color="0.6", lw=0.6)
    ax.set_xlabel("share of the entries, largest first (%)")
    ax.set_ylabel(label)
    return ax


def _axes(ax: Axes | None) -> Axes:
    return style.axes((5, 3.2)) if ax is None else ax
