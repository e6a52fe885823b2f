"""The figures of a comparison: from its arrays, nothing computed."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.compare.quantities import OPEN, QUANTITIES
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE, bars, cell_text
from curvescope.viz.spectrum import density

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.compare.study import Comparison

LAYER = re.compile(r"L(\d+)\.(.+)")
IN_A_ROW = 5
NEAR_ZERO = 1e-3  # of the largest eigenvalue: the axis of a density is linear below
LEAST_FOLD = 10.0  # colors of a ratio go at least so far up and down


def draw(found: Comparison) -> dict[str, Figure]:
    """Quantities, densities, and blocks where there are any."""
    figures = {"quantities": _quantities(found)}
    if all(side.whole.densities for side in found.sides):
        figures["density"] = _densities(found)
    if found.blocks:
        figures["block_ratios"] = _ratios(found)
        figures["block_sharpness"] = _sharpness(found)
    return figures


def _subplots(*shape: int, **options: Any) -> Any:
    import matplotlib.pyplot as plt

    return plt.subplots(*shape, layout="constrained", **options)


def _color(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _quantities(found: Comparison) -> Figure:
    """A panel for every quantity, a point with its interval for every side."""
    rows = -(-len(QUANTITIES) // IN_A_ROW)
    size = (2.4 * IN_A_ROW, (1.1 + 0.35 * len(found.sides)) * rows + 0.3)
    figure, axes = _subplots(rows, IN_A_ROW, figsize=size, sharey=True)
    for ax in axes.flat[len(QUANTITIES) :]:
        ax.set_visible(False)
    for ax, name in zip(axes.flat, QUANTITIES, strict=False):
        for number, side in enumerate(found.sides):
            value, low, high = side.quantity(name)
            error = np.nan_to_num([[max(value - low, 0.0)], [max(high - value, 0.0)]])
            ax.errorbar([value], [number], xerr=error, fmt="o", ms=5, capsize=3, color=_color(number))
        ax.set_title(name, fontsize=10, loc="left")
        ax.set_yticks(range(len(found.sides)), [side.name for side in found.sides], fontsize=8)
        ax.set_ylim(len(found.sides) - 0.5, -0.5)
        ax.margins(x=0.15)
        ax.locator_params(axis="x", nbins=4)
        ax.tick_params(axis="x", labelsize=8)
        ax.grid(axis="x", lw=0.3, color="0.9")
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def _densities(found: Comparison) -> Figure:
    """Hessians and GGNs of all sides, one panel each."""
    figure, axes = _subplots(1, 2, figsize=(11, 3.8), sharey=True)
    for ax, part, title in zip(axes, ("hessian", "ggn"), ("Hessian", "GGN"), strict=True):
        ends = [abs(end) for side in found.sides for end in side.whole.densities[part].extremes]
        for number, side in enumerate(found.sides):
            ax.set_prop_cycle(color=[_color(number)])
            density(ax, *side.whole.densities[part].band(), log_y=True, label=side.name)
        _both_sides(ax, max(ends) or 1.0)
        if part == "ggn":
            ax.set_xlim(left=0.0)
        ax.set_title(title, fontsize=11, loc="left")
    axes[1].set_ylabel("")
    return figure


def _both_sides(ax: Axes, end: float) -> None:
    """A logarithmic axis on both sides of zero, linear near it, with few ticks that stand apart."""
    left, right = ax.get_xlim()
    ax.set_xscale("symlog", linthresh=NEAR_ZERO * end)
    powers = 10.0 ** np.arange(math.floor(math.log10(end)) - 1, math.floor(math.log10(end)) + 1)
    ax.set_xticks([power for power in (*-powers[::-1], 0.0, *powers) if left <= power <= right])
    ax.set_xlim(left, right)


def _ratios(found: Comparison) -> Figure:
    """Layer × role maps of norms over those of the first side, a row for every other side."""
    inside = [match for name in found.blocks if (match := LAYER.fullmatch(name))]
    layers = sorted({int(match[1]) for match in inside})
    roles = list(dict.fromkeys(match[2] for match in inside))
    outside = [name for name in found.blocks if not LAYER.fullmatch(name)]
    cells = [[f"L{layer}.{role}" for role in roles] for layer in layers]
    grids = [grid for grid in (cells, [outside]) if grid and grid[0]]
    rows, wide = len(found.sides) - 1, [max(len(grid[0]), 1) for grid in grids]
    size = (max(5.5, 2.6 + 0.75 * sum(wide)), (1.3 + 0.3 * max(len(layers), 2)) * rows)
    fold = _fold(found)
    figure, axes = _subplots(rows, len(grids), figsize=size, width_ratios=wide, squeeze=False)
    for number, row in enumerate(axes, start=1):
        for ax, grid in zip(row, grids, strict=True):
            _cells(ax, found, number, grid, fold)
            ax.set_xticks(range(len(grid[0])), [_role(name) for name in grid[0]], fontsize=8)
        title = f"‖H_bb‖ of {found.sides[number].name} over {found.sides[0].name}"
        row[0].set_title(title, fontsize=10, loc="left")
        figure.colorbar(row[0].images[0], ax=list(row), label="ratio", pad=0.01, aspect=12)
    return figure


def _fold(found: Comparison) -> float:
    """How far colors go: to the largest change, up or down."""
    others = range(1, len(found.sides))
    values = np.array([found.ratio(i, "‖H‖_F", block).value for i in others for block in found.blocks])
    known = values[np.isfinite(values) & (values > 0)]
    return float(max(LEAST_FOLD, np.maximum(known, 1 / known).max(initial=1.0)))


def _role(name: str) -> str:
    match = LAYER.fullmatch(name)
    return match[2] if match else name


def _cells(ax: Axes, found: Comparison, number: int, grid: list[list[str]], fold: float) -> None:
    """One map: the ratio in every cell, blank where there is no block."""
    from matplotlib.colors import LogNorm

    there = set(found.blocks)
    values = np.array(
        [[found.ratio(number, "‖H‖_F", b).value if b in there else math.nan for b in row] for row in grid]
    )
    norm = LogNorm(1 / fold, fold, clip=True)
    ax.imshow(np.ma.masked_invalid(values), norm=norm, cmap=style.SIGNED, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        block = grid[i][j]
        if block not in there:
            continue
        text = cell_text(float(f"{value:.2g}")) if math.isfinite(value) else "–"
        text = f"({text})" if found.difference(number, "‖H‖_F", block).verdict == OPEN else text
        dark = math.isfinite(value) and abs(2 * norm(value) - 1) > 0.6
        ax.text(j, i, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    layered = LAYER.fullmatch(grid[0][0])
    words = [row[0].split(".")[0] for row in grid] if layered else []
    ax.set_yticks(range(len(words)), words)
    ax.tick_params(length=0, labelsize=8)


def _sharpness(found: Comparison) -> Figure:
    """λ_max of every block, all sides beside each other."""
    figure, ax = _subplots(figsize=(max(5.0, 2.5 + 0.3 * len(found.blocks)), 3.6))
    series = {
        side.name: tuple(np.array([side.quantity("λ_max", block) for block in found.blocks]).T)
        for side in found.sides
    }
    bars(ax, found.blocks, series, label="λ_max of the block")  # pyright: ignore[reportArgumentType]
    return figure
