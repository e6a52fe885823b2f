"""The figures of the study `prune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.prune.correlations import measured, predicted, removed_kinds
from curvescope.studies.prune.tables import every_set
from curvescope.studies.weight_changes import Part
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE
from curvescope.viz.style import around_zero
from curvescope.viz.trajectory import Marks, Names, name_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.prune.study import Pruned

PANELS = (
    ("compensated", "obs", "OBS: its saliency"),
    ("compensated", "both orders", "OBS: gᵀδ + ½ δᵀHδ"),
    ("plain", "obd", "plain: OBD, ½ Σ G_qq w²"),
    ("plain", "both orders", "plain: gᵀδ + ½ δᵀHδ"),
)
PARTS: tuple[Part, Part] = ("measured", "held_out")
MARKS = "osD^vP*X"
TAKEN: tuple[Any, ...] = ("-", "--", "-.", (0, (6, 1, 1, 1, 1, 1)))
"""Dashes of what was measured; dots are of what was predicted."""
REACH = (4.5, 13.0, 24.0, 36.0, 50.0, 66.0)  # points from a head to its name


def draw(result: Pruned) -> dict[str, Figure]:
    """By name."""
    found = {"samples": _samples(result)}
    found["sets"] = _sets(result)
    if result.heads:
        found["heads"] = _heads(result)
    return found


def _samples(result: Pruned) -> Figure:
    """Predicted against measured: a row for what is removed, a column for a predictor."""
    import matplotlib.pyplot as plt

    kinds = {kind: parts for kind, parts in removed_kinds(result).items() if kind != "heads"}
    size = (12.5, 2.8 * len(kinds) + 0.3)
    figure, axes = plt.subplots(len(kinds), 4, figsize=size, layout="constrained", squeeze=False)
    for row, (kind, parts) in zip(axes, kinds.items(), strict=True):
        for ax, (how, predictor, _) in zip(row, PANELS, strict=True):
            for i, (name, some) in enumerate(zip(result.how, parts, strict=True)):
                values = predicted(some, how, predictor), measured(some, how)
                look = {"ms": 4, "alpha": 0.7, "color": PALETTE[i % len(PALETTE)]}
                ax.plot(*values, MARKS[i % len(MARKS)], label=name, **look)
            _equal(ax)
        row[0].set_ylabel(f"{kind}\nmeasured increase", fontsize=8)
    for ax, (_, _, title) in zip(axes[0], PANELS, strict=True):
        ax.set_title(f"{title}\n", fontsize=9, loc="left")
    for ax in axes[-1]:
        ax.set_xlabel("predicted", fontsize=8)
    axes[0][0].legend(fontsize=7, frameon=False)
    return figure


def _equal(ax: Axes) -> None:
    """The line where what was predicted came out, and few numbers on the axes."""
    low, high = ax.get_xlim()
    ax.axline((0, 0), slope=1, color="0.5", lw=0.7)
    ax.axhline(0, color="0.85", lw=0.6, zorder=0)
    ax.set_xlim(low, high)
    ax.locator_params(nbins=5)
    ax.ticklabel_format(style="sci", scilimits=(-2, 3), useMathText=True)
    ax.xaxis.get_offset_text().set_fontsize(7)
    ax.yaxis.get_offset_text().set_fontsize(7)
    ax.tick_params(labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)


def _sets(result: Pruned) -> Figure:
    """Increase of the loss against sparsity: a line for every method, a column for every block."""
    import matplotlib.pyplot as plt

    count = len(result.sets)
    size = (1.9 + 4.2 * count, 6.4)
    figure, axes = plt.subplots(2, count, figsize=size, layout="constrained", squeeze=False, sharex=True)
    for column, name in zip(axes.T, result.sets, strict=True):
        lines = [(sets, method) for sets in every_set(result, name) for method in sets.methods]
        for i, (sets, method) in enumerate(lines):
            look = {"color": style.MANY[i % len(style.MANY)], "lw": 1.3}
            x = 100 * sets.sparsities + 0.6 * (i - (len(lines) - 1) / 2)
            effects = sets.at(method)
            for ax, part in zip(column, PARTS, strict=True):
                found = [effects.interval(part, j) for j in range(len(x))]
                mean = np.array([one.value for one in found])
                ends = np.abs(np.array([[one.low, one.high] for one in found]).T - mean)
                taken = {"marker": MARKS[i % len(MARKS)], "ls": TAKEN[i % len(TAKEN)], "ms": 5}
                ax.errorbar(x, mean, yerr=np.nan_to_num(ends), label=method, **taken, **look)
            column[0].plot(x, effects.predicted.mean(1), ":", **look)
        for ax in column:
            ax.axhline(0, color="0.5", lw=0.6)
            around_zero(ax, 0.01)
            ax.tick_params(labelsize=8)
            ax.spines[["top", "right"]].set_visible(False)
        column[0].set_title(name, fontsize=9, loc="left")
        column[1].set_xlabel("weights that go, %", fontsize=9)
    axes[0][0].set_ylabel("increase of the loss on the data of curvature", fontsize=8)
    axes[1][0].set_ylabel("on other data", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    handles = [*handles, *axes[0][0].plot([], [], ":", color="0.3", lw=1.1)]
    look = {"fontsize": 8, "frameon": False, "loc": "outside right"}
    figure.legend(handles, [*labels, "predicted"], **look)
    return figure


def _heads(result: Pruned) -> Figure:
    """Heads by name, predicted against measured, plain and with the others' answer."""
    import matplotlib.pyplot as plt

    panels = (("plain", "both orders", "plain"), ("compensated", "both orders", "the other heads answer"))
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 4.6), layout="constrained")
    for ax, (how, predictor, title) in zip(axes, panels, strict=True):
        for heads in result.heads.values():
            x, y = predicted(heads, how, predictor), measured(heads, how)
            ax.plot(x, y, "o", ms=4, color=PALETTE[heads.layer % len(PALETTE)])
        _equal(ax)
        ax.set_title(f"{title}\n", fontsize=10, loc="left")
        ax.set_xlabel("predicted, gᵀδ + ½ δᵀHδ", fontsize=9)
    axes[0].set_ylabel("measured increase of the loss", fontsize=9)
    figure.draw_without_rendering()  # where the axes are
    for ax, (how, predictor, _) in zip(axes, panels, strict=True):
        _name_heads(ax, result, how, predictor)
    return figure


def _name_heads(ax: Axes, result: Pruned, how: str, predictor: str) -> None:
    """Every head by its name, where there is room for it, off the line."""
    groups = []
    for heads in result.heads.values():
        points = np.column_stack([predicted(heads, how, predictor), measured(heads, how)])
        names = [f"L{heads.layer}.h{h}" for h in range(len(points))]
        groups.append(Names(points, names, PALETTE[heads.layer % len(PALETTE)], 7))
    low, high = ax.get_xlim()
    line = np.repeat(np.linspace(low, high, 200)[:, None], 2, axis=1)
    shown = line[(line[:, 1] > ax.get_ylim()[0]) & (line[:, 1] < ax.get_ylim()[1])]
    marks = [*(Marks(group.points) for group in groups), Marks(shown, 0.5)]
    name_points(ax, groups, clear=marks, distances=REACH)
