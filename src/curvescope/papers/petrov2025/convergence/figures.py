"""The figures of `convergence`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.papers.petrov2025.convergence.study import Convergence, Curve

TITLES = {
    "E4": "E4: a ViT, batch by batch",
    "E7": "E7: changes of low rank",
    "E8": "E8: fully connected",
}


def draw(found: Convergence) -> dict[str, Figure]:
    """Every figure by name."""
    return {"convergence": _curves(found), "convergence_widths": _widths(found)}


def _curves(found: Convergence) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(TITLES), figsize=(13, 4.2), layout="constrained")
    for ax, (family, title) in zip(axes, TITLES.items(), strict=True):
        curves = found.of(family)
        for i, (name, curve) in enumerate(curves.items()):
            color = plt.get_cmap("turbo")(0.05 + 0.9 * i / max(1, len(curves) - 1))
            _one(ax, curve, _label(name, curve), PALETTE[i] if len(curves) <= len(PALETTE) else color)
        ax.plot([], [], color="0.3", lw=1, ls=":", label="control")
        if family != "E8":
            ax.plot([], [], color="0.3", lw=0.7, ls="--", label="mean |l − mean| / k")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("pictures k")
        ax.set_title(title, fontsize=10)
        ax.legend(fontsize=7, loc="lower left")
    axes[0].set_ylabel("mean |L$_{k+1}$ − L$_k$|, smoothed")
    return figure


def _one(ax: Axes, curve: Curve, label: str, color: Any) -> None:
    g, k = curve.growth, curve.growth.k * curve.group
    ax.plot(k, g.model.smoothed, color=color, lw=1.5, label=label)
    ax.plot(k, g.control.smoothed, color=color, lw=1, ls=":")
    if curve.family != "E8":  # one line each: too many there
        ax.plot(k, g.deviation / g.k, color=color, lw=0.7, ls="--")


def _label(name: str, curve: Curve) -> str:
    if curve.family == "E8":
        return f"width {curve.width}, {curve.hidden + 2} matrices"
    return f"rank {name.rpartition('rank')[2]}" if curve.family == "E7" else curve.network


def _widths(found: Convergence) -> Figure:
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(5.6, 4), layout="constrained")
    curves = list(found.of("E8").values())
    for i, hidden in enumerate(sorted({c.hidden for c in curves})):
        some = sorted((c.width, c.deviation) for c in curves if c.hidden == hidden)
        x, y = np.array(some).T
        ax.plot(x, y, "o-", color=PALETTE[i % len(PALETTE)], lw=1, ms=4, label=f"{hidden + 2} matrices")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("width h")
    ax.set_title("mean |l − mean|, the limit of k|L$_{k+1}$ − L$_k$|", fontsize=10)
    ax.legend(fontsize=8)
    return figure
