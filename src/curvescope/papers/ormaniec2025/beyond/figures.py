"""The figures of `beyond`: exponents of all pairs of blocks, and curves of the diagonal ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.papers.ormaniec2025.growth.figures import TITLES
from curvescope.papers.ormaniec2025.growth.settings import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.papers.ormaniec2025.beyond.study import Beyond

MANY = 16  # blocks beyond which no numbers are written


def draw(result: Beyond) -> dict[str, Figure]:
    """Both figures."""
    return {"beyond_exponents": _exponents(result), "beyond_curves": _curves(result)}


def _exponents(result: Beyond) -> Figure:
    import matplotlib.pyplot as plt

    names = result.names
    side = 2.2 + 0.36 * len(names)
    figure, axes = plt.subplots(1, 3, figsize=(3 * side, side + 0.6), layout="constrained", sharey=True)
    known = result.exponents[np.isfinite(result.exponents)]
    top = float(np.abs(known).max(initial=1.0))
    for ax, part, values in zip(axes, PARTS, result.exponents, strict=True):
        ax.imshow(values, cmap="RdBu_r", vmin=-top, vmax=top)
        ax.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        ax.set_yticks(range(len(names)), names, fontsize=8)
        ax.set_title(TITLES[part], fontsize=11)
        if len(names) <= MANY:
            for i, j in np.argwhere(np.isfinite(values)):
                color = "white" if abs(values[i, j]) > 0.7 * top else "black"
                ax.text(j, i, f"{values[i, j]:.1f}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(axes[0].images[0], ax=list(axes), label="exponent of σ", shrink=0.8)
    return figure


def _curves(result: Beyond) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), layout="constrained", sharey=True)
    colors = plt.get_cmap("turbo")(np.linspace(0.05, 0.95, len(result.names)))
    for p, (ax, part) in enumerate(zip(axes, PARTS, strict=True)):
        for i, name in enumerate(result.names):
            values = result.frobenius[:, p, i, i]
            good = values > 0
            if good.any():
                ax.plot(result.sigma[good], values[good], color=colors[i], lw=1.4, marker=".", label=name)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.axvline(1, color="0.4", lw=0.8, ls=":")
        ax.set_title(TITLES[part], fontsize=11)
        ax.set_xlabel("scale σ of the embeddings")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("‖block‖ F")
    handles, labels = axes[2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return figure
