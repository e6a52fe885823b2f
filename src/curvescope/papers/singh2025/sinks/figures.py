"""The figures of sinks on models of several conditions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.papers.singh2025.sinks.cases import TRAINED
from curvescope.studies.sinks.effects import Quantity, effect
from curvescope.studies.sinks.figures import few_ticks
from curvescope.studies.sinks.tables import all_ways
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.papers.singh2025.sinks.study import SinkCases

PANELS: dict[Quantity, str] = {"lambda_max": "λ_max", "bulk_width": "bulk width", "stretch": "stretch"}

BESIDE = 1.06  # from model to model at one strength


def draw(result: SinkCases) -> dict[str, Figure]:
    """The bias on every model, and all ways on the trained one."""
    return {"bias": _bias(result), "spectra": result.cases[TRAINED].figures()["spectra"]}


def _bias(result: SinkCases) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3.7), layout="constrained")
    for ax, (quantity, title) in zip(axes, PANELS.items(), strict=True):
        for i in range(len(result.cases)):
            _follow(ax, result, i, quantity)
        ax.axhline(1, color="0.5", lw=0.6)
        ax.set_xscale("symlog", linthresh=1)
        ax.set_yscale("log")
        ax.set_xticks([0, 1, 2, 4, 8], ["0", "1", "2", "4", "8"])
        ax.set_xlim(-0.2, 11)
        ax.set_xlabel("bias at the first key")
        ax.set_title(f"{title}, times", fontsize=10, loc="left")
        few_ticks(ax)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=7, frameon=False)
    return figure


def _follow(ax: Axes, result: SinkCases, i: int, quantity: Quantity) -> None:
    name, one = list(result.cases.items())[i]
    ways = [way for way in all_ways(one) if way.how == "bias"]
    x = np.array([way.strength for way in ways])
    beside = x * BESIDE ** (i - (len(result.cases) - 1) / 2)
    found = [effect(one, way.name, quantity) for way in ways]
    color = PALETTE[i % len(PALETTE)]
    ax.plot(x, [e.mean for e in found], "-", lw=1.3, color=color, label=name)
    for t in range(len(found[0].texts)):
        values = np.array([e.texts[t] for e in found])
        spread = np.array([e.errors[t] for e in found])
        errors = [values - values * np.exp(-spread), values * np.exp(spread) - values]
        ax.errorbar(
            beside, values, yerr=np.nan_to_num(errors), fmt="o", ms=2.5, lw=0.8, color=color, alpha=0.5
        )
