"""The figures of the study `blocks`: from its arrays, nothing computed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.parts import MATRIX_SYMBOLS, TITLES
from curvescope.studies.blocks.words import MOST_RANKED
from curvescope.viz import blocks, spectrum, style
from curvescope.viz.style import LOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.algorithms import Eigenpairs
    from curvescope.studies.blocks.study import Blocks

LAYER = re.compile(r"L(\d+)\.(.+)")
DECADES = 4  # of the colors, below the largest value
PANELS_PER_ROW = 5
CELL = 0.5  # inches that the number of a cell takes
Numbers = Mapping[str, tuple[float, float, float]]  # value and the ends of its interval by block


def draw(result: Blocks) -> dict[str, Figure]:
    """Maps of traces and norms; eigenvalues, densities and divergences where they were asked for."""
    traces = {
        operator: {
            name: (part.trace_of(name)[0], *part.trace_interval(name))
            for name in result.names
            if part.trace_of(name)[2]
        }
        for operator, part in result.parts.items()
    }
    norms = {
        operator: {name: (n.norm, n.norm_low, n.norm_high) for name, n in part.norms.items()}
        for operator, part in result.parts.items()
    }
    first = next(iter(result.parts.values()))
    found = {"sharpness": _sharpness(result)} if len(first.ranking()) > 1 else {}
    found["traces"] = _maps(traces, "trace of the block", signed=True)
    if first.norms:
        found["norms"] = _maps(norms, "Frobenius norm of the block", signed=False)
    if first.extremes:
        found["extremes"] = _extremes(result)
    if first.densities:
        found["densities"] = _densities(result)
    if first.heterogeneity is not None:
        found["heterogeneity"] = _heterogeneity(result)
    return found


def _maps(numbers: Mapping[str, Numbers], label: str, *, signed: bool) -> Figure:
    """Layer × role maps, one row of panels per operator; bars where no block belongs to a layer."""
    import matplotlib.pyplot as plt

    names = list(next(iter(numbers.values())))
    inside = [match for name in names if (match := LAYER.fullmatch(name))]
    if not inside:
        figure, ax = plt.subplots(figsize=(12, 3.6), layout="constrained")
        series = {MATRIX_SYMBOLS[o]: _columns(found, names) for o, found in numbers.items()}
        blocks.bars(ax, names, series, label=label)
        return figure
    layers = sorted({int(match[1]) for match in inside})
    roles = list(dict.fromkeys(match[2] for match in inside))
    outside = [name for name in names if not LAYER.fullmatch(name)]
    height = 1.3 + 0.27 * max(len(layers), 4)
    size = (2.5 + CELL * (len(roles) + len(outside)), height * len(numbers) + 0.3)
    ratio = [max(len(roles), 2), max(len(outside), 1)]
    figure, axes = plt.subplots(
        len(numbers), 2, figsize=size, layout="constrained", width_ratios=ratio, squeeze=False
    )
    norm = _scale([item[0] for found in numbers.values() for item in found.values()], signed)
    for (left, right), (operator, found) in zip(axes, numbers.items(), strict=True):
        cells = [[f"L{layer}.{role}" for role in roles] for layer in layers]
        image = _cells(left, cells, found, norm, signed)
        left.set_xticks(range(len(roles)), roles, rotation=90, fontsize=8)
        left.set_yticks(range(len(layers)), [f"L{layer}" for layer in layers], fontsize=8)
        left.set_title(TITLES[operator], fontsize=11, loc="left")
        right.set_visible(bool(outside))
        if outside:
            _cells(right, [outside], found, norm, signed)
            right.set_xticks(range(len(outside)), outside, rotation=90, fontsize=8)
            right.set_yticks([])
        bar = figure.colorbar(image, ax=[left, right], label=label, pad=0.01, aspect=12)
        bar.set_ticks(blocks.color_ticks(norm), minor=False)
        bar.minorticks_off()
    return figure


def _columns(found: Numbers, names: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    triples = np.array([found[name] for name in names], dtype=float)
    return triples[:, 0], triples[:, 1], triples[:, 2]


def _scale(values: list[float], signed: bool) -> Any:
    """Colors over four decades, on both sides of zero where values have a sign."""
    from matplotlib.colors import LogNorm, SymLogNorm

    top = blocks.largest(values)
    if signed and min(values) < 0:
        return SymLogNorm(linthresh=top * 10.0**-DECADES, vmin=-top, vmax=top)
    return LogNorm(vmin=top * 10.0**-DECADES, vmax=top, clip=True)


def _cells(ax: Axes, cells: list[list[str]], found: Numbers, norm: Any, signed: bool) -> Any:
    """A heat map with its numbers; blank where there is no block, hatched where zero is not excluded."""
    values = np.array([[found.get(name, (np.nan,))[0] for name in row] for row in cells])
    values = values.reshape(len(cells), -1)
    two_sided = norm.vmin < 0
    image = ax.imshow(values, norm=norm, cmap=style.SIGNED if two_sided else style.MAP, aspect="auto")
    for i, row in enumerate(cells):
        for j, name in enumerate(row):
            if name not in found:
                continue
            value, low, high = found[name]
            depth = 2 * abs(float(norm(value)) - 0.5) if two_sided else float(norm(value))
            color = "white" if depth > 0.75 else "black"
            ax.text(j, i, blocks.cell_text(value), ha="center", va="center", fontsize=7, color=color)
            if signed and low <= 0 <= high and low < high:
                ax.fill_between(
                    [j - 0.5, j + 0.5],
                    i - 0.5,
                    i + 0.5,
                    facecolor="none",
                    hatch="////",
                    edgecolor="0.55",
                    lw=0,
                )
    ax.tick_params(length=0)
    ax.set_facecolor("0.96")
    for side in ax.spines.values():
        side.set_visible(False)
    return image


def _sharpness(result: Blocks) -> Figure:
    """λ_max of the sharpest blocks, in the order of the first operator."""
    import matplotlib.pyplot as plt

    order = next(iter(result.parts.values())).ranking()[:MOST_RANKED]
    series = {}
    for operator, part in result.parts.items():
        told = [part.sharpness(name) for name in order]
        values = np.array([s.largest for s in told])
        high = np.array([s.high for s in told])
        series[TITLES[operator]] = values, values, np.where(np.isnan(high), values, high)
    figure, ax = plt.subplots(figsize=(2.5 + 0.24 * len(order), 3.8), layout="constrained")
    blocks.bars(ax, order, series, label="λ_max of the block")
    return figure


def _extremes(result: Blocks) -> Figure:
    import matplotlib.pyplot as plt

    count = len(result.parts)
    figure, axes = plt.subplots(
        1, count, figsize=(6.2 * count, 3.8), layout="constrained", sharey=True, squeeze=False
    )
    values: list[float] = []
    for ax, (operator, part) in zip(axes[0], result.parts.items(), strict=True):
        pairs = list(part.extremes.values())
        ends = {"λ max": -1} | ({"λ min": 0} if all(len(pair.values) > 1 for pair in pairs) else {})
        series = {label: _ends(pairs, i) for label, i in ends.items()}
        values += [float(value) for found, *_ in series.values() for value in found]
        blocks.bars(ax, list(part.extremes), series, label="eigenvalue of the block", log=False)
        ax.set_title(TITLES[operator], fontsize=11, loc="left")
    top = blocks.largest(values)
    smallest = min((abs(value) for value in values if abs(value) >= 1e-6 * top), default=top)
    axes[0, 0].set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(smallest)), linscale=0.7)
    axes[0, 0].set_ylim(3 * min(*values, 0.0), 3 * max(*values, smallest / 3))
    return figure


def _ends(pairs: list[Eigenpairs], i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eigenvalue i of each block, and the ends of value ± residual."""
    values, residuals = (np.array([getattr(p, name)[i] for p in pairs]) for name in ("values", "residuals"))
    return values, values - residuals, values + residuals


def _densities(result: Blocks) -> Figure:
    """One panel per block, all operators in it."""
    import matplotlib.pyplot as plt

    names = list(next(iter(result.parts.values())).densities)
    columns = min(len(names), PANELS_PER_ROW)
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(max(2.6 * columns, 5), 1.9 * rows + 0.5), layout="constrained", squeeze=False
    )
    for ax, name in zip(axes.flat, names, strict=False):
        for operator, part in result.parts.items():
            look = LOOKS[operator]
            ax.set_prop_cycle(color=[look.color], linestyle=[look.dash])
            spectrum.density(ax, *part.densities[name].band(), log_y=True)
        widths = ", ".join(f"{part.densities[name].width:.2g}" for part in result.parts.values())
        ax.set_title(f"{name} (width {widths})", fontsize=8)
        ax.set(xlabel="", ylabel="")
        ax.tick_params(labelsize=7)
        ax.locator_params(axis="x", nbins=4)
        ax.axvline(0, color="0.6", lw=0.5)  # after the curves, which the legend counts on
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    figure.supxlabel("eigenvalue λ", fontsize=9)
    figure.supylabel("density of eigenvalues", fontsize=9)
    lines = axes.flat[0].lines[: len(result.parts)]
    figure.legend(
        lines,
        [TITLES[o] for o in result.parts],
        loc="outside upper right",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    return figure


def _heterogeneity(result: Blocks) -> Figure:
    import matplotlib.pyplot as plt

    parts = {o: p.heterogeneity for o, p in result.parts.items() if p.heterogeneity is not None}
    count = max(len(h.names) for h in parts.values())
    side = 2.0 + 0.32 * min(count, 30)
    figure, axes = plt.subplots(
        1, len(parts), figsize=(side * len(parts) + 1, side), layout="constrained", squeeze=False
    )
    top = max(float(h.divergence.max()) for h in parts.values()) or 1.0
    image = None
    for ax, (operator, h) in zip(axes[0], parts.items(), strict=True):
        image = ax.imshow(h.divergence, vmin=0, vmax=top, cmap=style.MAP, interpolation="nearest")
        small = 8 if count <= 20 else 6
        ax.set_xticks(range(count), h.names, rotation=90, fontsize=small)
        ax.set_yticks(range(count), h.names, fontsize=small)
        ax.set_title(TITLES[operator], fontsize=11, loc="left")
        if count <= 14:
            for (i, j), value in np.ndenumerate(h.divergence):
                color = style.ink_at(image, value)
                ax.text(j, i, blocks.cell_text(value), ha="center", va="center", fontsize=6, color=color)
    if image is not None:
        figure.colorbar(image, ax=list(axes[0]), label="Jensen–Shannon divergence (bits)", shrink=0.9)
    return figure
