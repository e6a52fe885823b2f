"""The figures of the study `propagation`: from its arrays, nothing computed."""

from __future__ import annotations

import math
import re
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from curvescope.models.sources import REST
from curvescope.studies.propagation.shares import HESSIAN, OUTER, Number
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE, cell_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.propagation.study import Propagation

LAYER = re.compile(r"L(\d+)\.(.+)")
DECADES = 4  # of the colors, below the largest value
MOST_NAMED = 30  # sources whose names fit under an axis
MOST_OUTSIDE = 4  # blocks that are named with the rest


def draw(result: Propagation) -> dict[str, Figure]:
    """The flow through the layers in four panels, and a map of layers and kinds."""
    return {"flow": _flow(result), "norms": _norms(result)}


def kinds_of(result: Propagation) -> list[str]:
    """Kinds of sources inside layers: ln1, attention, …"""
    found = [match[2] for name in result.sources if (match := LAYER.fullmatch(name))]
    return list(dict.fromkeys(found))


def _layers(result: Propagation) -> list[int]:
    return sorted({int(match[1]) for name in result.sources if (match := LAYER.fullmatch(name))})


def _flow(result: Propagation) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11.5, 7.6), layout="constrained")
    _by_layer(axes[0][0], result)
    _shares(axes[0][1], result)
    _eigenvalues(axes[1][0], result)
    _coupling(axes[1][1], result)
    figure.suptitle(f"Where the curvature of {result.model} comes from", fontsize=12)
    return figure


def _by_layer(ax: Axes, result: Propagation) -> None:
    """Frobenius norms of the kinds over the layers, with H and the GGN as lines across."""
    layers = _layers(result)
    for i, kind in enumerate(kinds_of(result)):
        at = [layer for layer in layers if f"L{layer}.{kind}" in result.sources]
        found = [result.shares.norm(f"L{layer}.{kind}") for layer in at]
        _points(ax, np.array(at, dtype=float), found, style.look(i), label=kind)
    for name, dash in ((HESSIAN, "-"), (OUTER, "--")):
        ax.axhline(result.shares.norm(name).value, color="0.45", lw=1, ls=dash, label=name)
    outside = [name for name in result.sources if not LAYER.fullmatch(name)]
    for i, name in enumerate(outside):
        place = np.array([max(layers, default=-1) + 1.0 + i])
        _points(ax, place, [result.shares.norm(name)], style.Look("0.2", "", "o"))
    ticks = [*layers, *(max(layers, default=-1) + 1 + i for i in range(len(outside)))]
    every = max(1, len(layers) // 12)
    names = [f"L{layer}" if layer % every == 0 else "" for layer in layers] + outside
    ax.set_xticks(ticks, names, rotation=90 if len(ticks) > 8 else 0, fontsize=8)
    ax.set_yscale("log")
    ax.set_title("Frobenius norm of each source", fontsize=10, loc="left")
    ax.legend(fontsize=8, frameon=False, ncols=2)
    _plain(ax)


def _points(ax: Axes, x: np.ndarray, found: list[Number], look: style.Look, *, label: str = "") -> None:
    values = np.array([n.value for n in found])
    low, high = np.array([n.low for n in found]), np.array([n.high for n in found])
    errors = np.nan_to_num(np.maximum([values - low, high - values], 0.0))
    drawn = {"color": look.color, "ls": look.dash, "marker": look.mark, "ms": 3.5, "lw": 1}
    ax.errorbar(x, values, yerr=errors, label=label or None, **drawn)


def _shares(ax: Axes, result: Propagation) -> None:
    names = [OUTER, *result.sources]
    y = np.arange(len(names))[::-1]
    found = [result.shares.share(name) for name in names]
    values = np.array([n.value for n in found])
    errors = np.nan_to_num(
        [[max(n.value - n.low, 0.0) for n in found], [max(n.high - n.value, 0.0) for n in found]]
    )
    colors = [PALETTE[0] if value >= 0 else PALETTE[1] for value in values]
    ax.barh(y, values, xerr=errors, color=colors, height=0.7, error_kw={"lw": 0.8, "ecolor": "0.3"})
    size = 8 if len(names) <= MOST_NAMED else 5
    ax.set_yticks(y, [_named(result, name) for name in names], fontsize=size)
    ax.axvline(0, color="0.4", lw=0.6)
    ax.set_title("share of ‖H‖²: together 1, below zero takes away", fontsize=10, loc="left")
    _plain(ax)


def _eigenvalues(ax: Axes, result: Propagation) -> None:
    names = [name for name in result.shares.names if not math.isnan(result.ends_of(name)[0])]
    ends = np.array([result.ends_of(name) for name in names])
    bounds = np.array([result.bounds_of(name) for name in names])
    x = np.arange(len(names))
    if not names:
        ax.text(0.5, 0.5, "no Lanczos steps were asked for", ha="center", transform=ax.transAxes)
        ax.set_axis_off()
        return
    nothing, look = np.zeros(len(names)), {"fmt": "o", "ms": 3.5, "lw": 1}
    up, down = np.maximum(bounds[:, 1] - ends[:, 0], 0), np.maximum(ends[:, 2] - bounds[:, 0], 0)
    ax.errorbar(x, ends[:, 0], yerr=[nothing, up], color=PALETTE[1], label="λ max", **look)
    ax.errorbar(x, ends[:, 2], yerr=[down, nothing], color=PALETTE[0], label="λ min", **look)
    ax.axhline(0, color="0.4", lw=0.6)
    top = float(np.nanmax(np.abs(ends[:, [0, 2]]))) or 1.0
    ax.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(top * 1e-3)))
    ax.set_ylim(-3 * top, 3 * top)
    ax.set_xticks(x, names, rotation=90, fontsize=8 if len(names) <= MOST_NAMED else 5)
    ax.set_title("extreme eigenvalues of each source", fontsize=10, loc="left")
    ax.legend(fontsize=8, frameon=False)
    _plain(ax)


def _coupling(ax: Axes, result: Propagation) -> None:
    """‖H_lm‖ over the geometric mean of the diagonal blocks: one on the diagonal."""
    m = result.coupling
    if m is None:
        ax.text(0.5, 0.5, "no map was asked for", ha="center", transform=ax.transAxes)
        ax.set_axis_off()
        return
    own = np.sqrt(np.maximum(np.diag(m.frobenius), np.finfo(float).tiny))
    both = np.sqrt((m.frobenius**2 + m.frobenius.T**2) / 2)  # H_lm and its transpose have other probes
    values = both / np.outer(own, own)
    image = ax.imshow(values, cmap=style.MAP, vmin=0)
    if len(m.names) <= 8:
        for (i, j), value in np.ndenumerate(values):
            color = style.ink_at(image, value)
            ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    size = 8 if len(m.names) <= 14 else 6
    ax.set_xticks(range(len(m.names)), [fill(name, 10) for name in m.names], rotation=90, fontsize=size)
    ax.set_yticks(range(len(m.names)), m.names, fontsize=size)
    ax.figure.colorbar(image, ax=ax, shrink=0.8)
    ax.set_title("coupling of layers, ‖H_lm‖ / √(‖H_ll‖ ‖H_mm‖)", fontsize=10, loc="left")


def _norms(result: Propagation) -> Figure:
    """Layers × kinds, with numbers."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    layers, kinds = _layers(result), kinds_of(result)
    outside = [name for name in result.sources if not LAYER.fullmatch(name)]
    rows = [[f"L{layer}.{kind}" for kind in kinds] for layer in layers] or [outside]
    columns = kinds if layers else outside
    values = np.array([[_value(result, name) for name in row] for row in rows])
    top = float(np.nanmax(values)) or 1.0
    size = (2.6 + 0.95 * len(columns), 1.2 + 0.3 * max(len(rows), 3))
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    norm = LogNorm(vmin=top * 10.0**-DECADES, vmax=top, clip=True)
    image = ax.imshow(np.ma.masked_invalid(values), norm=norm, cmap=style.MAP, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        if np.isfinite(value):
            color = "white" if float(norm(max(value, norm.vmin or 0.0))) > 0.75 else "black"
            ax.text(j, i, cell_text(float(value)), ha="center", va="center", fontsize=8, color=color)
    ax.set_xticks(range(len(columns)), columns, fontsize=8)
    ax.set_yticks(range(len(rows)), [f"L{layer}" for layer in layers] or [""], fontsize=8)
    figure.colorbar(image, ax=ax, label="Frobenius norm of the source")
    return figure


def _named(result: Propagation, name: str) -> str:
    """The name of a source; the rest with the blocks that it is of, where they are few."""
    few = 0 < len(result.outside) <= MOST_OUTSIDE
    return f"{name}: {', '.join(result.outside)}" if name == REST and few else name


def _value(result: Propagation, name: str) -> float:
    return result.shares.norm(name).value if name in result.sources else np.nan


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(lw=0.3, color="0.9")
