"""Figures of spectra: densities and cumulative distributions of eigenvalues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import ColorType

DECADES = 8  # decades shown below the maximum of a logarithmic density
HIGHEST = 10.0  # bounds are shown up to this multiple of the density


@style.in_style
def density(
    ax: Axes | None,
    grid: np.ndarray,
    density: np.ndarray,
    band: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    sure: tuple[np.ndarray, np.ndarray] | None = None,
    known: np.ndarray | None = None,
    nodes: np.ndarray | None = None,
    log_y: bool = False,
    label: str | None = None,
) -> Axes:
    """Draw a spectral density as a line with a band; return the Axes.

    Args:
        ax: where to draw; a new figure if None.
        sure: Certain bounds at each point; the range between them is gray.
        known: Mask of the points where the line is solid; it is dotted elsewhere.
        band: Low and high end at each point; points without finite ends have no band.
        nodes: eigenvalues, marked by short ticks at the bottom.
        log_y: logarithmic density, eight decades down from its maximum.
    """
    ax = _axes(ax)
    low_before, high_before = ax.get_ylim() if ax.has_data() else (np.inf, 0.0)  # keep other curves visible
    known = np.full(len(grid), fill_value=True) if known is None else known
    (line,) = ax.plot(grid, np.where(known, density, np.nan), lw=1.4, label=label)
    if not known.all():
        ax.plot(grid, density, lw=1.0, ls=":", color=line.get_color())
    top = float(np.max(density))
    floor = top * 10.0**-DECADES if log_y else 0.0
    if sure is not None:
        highest = min(float(sure[1].max()), HIGHEST * top)
        least, most = (np.clip(end, floor, highest) for end in sure)
        ax.fill_between(grid, least, most, color="0.85", lw=0, zorder=0.5)
        top = max(top, highest)
    if band is not None:
        low, high = band
        drawn = np.isfinite(low) & np.isfinite(high) & (high >= floor) & (high > low)
        low, high = np.maximum(low, floor), np.minimum(high, 100 * top)
        ax.fill_between(grid, low, high, where=drawn, color=line.get_color(), alpha=0.25, lw=0)
        top = float(np.max(high, where=drawn & (density > 1e-2 * top), initial=top))
    ax.set(
        yscale="log" if log_y else "linear",
        ylim=(min(floor, low_before), max(top * (2 if log_y else 1.05), high_before)),
    )
    if nodes is not None:
        ticks(ax, nodes, line.get_color())
    ax.set(xlabel="eigenvalue λ", ylabel="density of eigenvalues")
    if label is not None:
        ax.legend()
    return ax


@style.in_style
def cumulative(
    ax: Axes | None,
    edges: np.ndarray,
    bounds: tuple[np.ndarray, np.ndarray],
    wider: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    linear: float,
    nodes: np.ndarray | None = None,
    color: str | None = None,
) -> Axes:
    """Draw the share of eigenvalues up to λ, between bounds that are constant from edge to edge.

    Args:
        edges: (G + 1,) ascending.
        bounds: low and high, (G,) each: drawn dark.
        wider: bounds with the errors of the probes, drawn light.
        linear: |λ| below which the axis is linear; logarithmic beyond, on both sides.
        nodes: eigenvalues, marked by short ticks at the bottom.
    """
    ax = _axes(ax)
    color = color or style.BLUE
    if wider is not None and np.isfinite(wider).all():
        ax.stairs(wider[1], edges, baseline=wider[0], fill=True, color=color, alpha=0.2, lw=0)
    ax.stairs(bounds[1], edges, baseline=bounds[0], fill=True, color=color, alpha=0.6, lw=0)
    for ends in bounds:
        ax.stairs(ends, edges, baseline=None, color=color, lw=0.8)
    if nodes is not None:
        ticks(ax, nodes, color)
    ax.set_xscale("symlog", linthresh=linear, linscale=0.8)
    ends = edges if nodes is None else np.concatenate([edges, np.ravel(nodes)])
    low, high = float(ends.min()), float(ends.max())
    ax.set_xlim(low - 0.2 * abs(low) - linear / 2, high + 0.2 * max(abs(low), abs(high)))
    below, above = (_decades(linear, end) for end in (-low, high))
    ax.set_xticks([*(-below[::-1]), 0.0, *above])
    ax.set(ylim=(0, 1.02), xlabel="eigenvalue λ", ylabel="share of eigenvalues ≤ λ")
    return ax


def _decades(linear: float, end: float) -> np.ndarray:
    """Powers of ten between the linear part and the end of an axis, at most three of them."""
    if end < 3 * linear:
        return np.zeros(0)
    found = np.arange(np.ceil(np.log10(3 * linear)), np.floor(np.log10(end)) + 1)
    return 10.0 ** found[::-1][:: max(1, -(-len(found) // 3))][::-1]


def ticks(ax: Axes, places: np.ndarray, color: ColorType) -> None:
    """Draw short ticks at the bottom."""
    places = np.ravel(places)
    ax.plot(
        places, np.zeros(places.size), "|", color=color, ms=9, mew=1.2, alpha=0.8,
        transform=ax.get_xaxis_transform(), clip_on=False, in_layout=False,
    )  # fmt: skip


def note(ax: Axes, text: str, *, where: str = "right") -> None:
    """Write a small note in an upper corner."""
    x = 0.98 if where == "right" else 0.03
    ax.text(x, 0.97, text, transform=ax.transAxes, ha=where, va="top", color="0.3")


def extent(ax: Axes, low: float, high: float) -> None:
    """Draw a dark bar at the bottom from `low` to `high`, at least a visible dot."""
    ax.plot(
        [low, high], [0.012, 0.012], color="0.2", lw=4, solid_capstyle="round",
        transform=ax.get_xaxis_transform(), in_layout=False,
    )  # fmt: skip


def make_room(ax: Axes) -> None:
    """Raise the top of an axis for three small lines in a corner."""
    low, high = ax.get_ylim()
    ax.set_ylim(low, high * 30 if ax.get_yscale() == "log" else low + 1.3 * (high - low))


def _axes(ax: Axes | None) -> Axes:
    return style.axes((6, 3.5)) if ax is None else ax
