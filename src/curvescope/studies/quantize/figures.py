"""The figures of the study `quantize`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.studies.quantize.correlations import increases, predicted
from curvescope.studies.quantize.rounding import INPUTS, NEAREST
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.quantize.study import Quantized

MARKS = {NEAREST: "o", INPUTS: "D"}


def draw(result: Quantized) -> dict[str, Figure]:
    """By name."""
    return {"predictions": _predictions(result), "sensitivity": _sensitivity(result)}


def _predictions(result: Quantized) -> Figure:
    """A panel for every number of bits, a dot for every block and method."""
    import matplotlib.pyplot as plt

    bits = result.together.bits
    figure, axes = plt.subplots(
        1, len(bits), figsize=(3.5 * len(bits), 3.5), layout="constrained", squeeze=False
    )
    for i, (ax, b) in enumerate(zip(axes[0], bits, strict=True)):
        for k, (method, mark) in enumerate(MARKS.items()):
            x, y = predicted(result, "both orders", i, method), increases(result, i, method)
            ax.plot(x, y, mark, ms=4, alpha=0.75, color=PALETTE[k], label=method)
        _scaled(ax)
        ax.set_title(f"{b} bits", fontsize=10, loc="left")
        ax.set_xlabel("predicted, gᵀδ + ½ δᵀHδ", fontsize=9)
    axes[0][0].set_ylabel("measured increase of the loss", fontsize=9)
    axes[0][0].legend(fontsize=8, frameon=False)
    return figure


def _scaled(ax: Axes) -> None:
    """The line where what was predicted came out, and few numbers on the axes."""
    low, high = ax.get_xlim()
    ax.axline((0, 0), slope=1, color="0.5", lw=0.7)
    ax.axhline(0, color="0.85", lw=0.6, zorder=0)
    ax.set_xlim(low, high)
    ax.locator_params(nbins=5)
    ax.ticklabel_format(style="sci", scilimits=(-2, 3), useMathText=True)
    ax.tick_params(labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)


def _sensitivity(result: Quantized) -> Figure:
    """Measured increases of every block, a row for each number of bits; predicted ones beside them."""
    import matplotlib.pyplot as plt

    names, bits = list(result.blocks), result.together.bits
    figure, axes = plt.subplots(
        len(bits),
        1,
        figsize=(max(0.36 * len(names) + 1.5, 4), 1.9 * len(bits) + 0.6),
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    x = np.arange(len(names))
    for i, (ax, b) in enumerate(zip(axes[:, 0], bits, strict=True)):
        for k, method in enumerate(MARKS):
            found = [one.at(method).interval("measured", i) for one in result.blocks.values()]
            mean = np.array([one.value for one in found])
            ends = np.abs(np.array([[one.low, one.high] for one in found]).T - mean)
            place = x + 0.4 * k - 0.2
            ax.bar(place, mean, 0.38, color=PALETTE[k], label=method)
            ax.errorbar(place, mean, yerr=np.nan_to_num(ends), fmt="none", ecolor="0.45", lw=0.8)
            said = predicted(result, "both orders", i, method)
            label = "predicted" if k == 0 else None
            ax.plot(place, said, "_", ms=8, mew=1.6, color="black", label=label)
        ax.axhline(0, color="0.5", lw=0.6)
        ax.set_ylabel(f"{b} bits", fontsize=9)
        ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        ax.tick_params(labelsize=7)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_title("increase of the loss by one block", fontsize=10, loc="left")
    axes[0, 0].legend(fontsize=8, frameon=False, ncols=3)
    axes[-1, 0].set_xticks(x, names, rotation=90, fontsize=7)
    return figure
