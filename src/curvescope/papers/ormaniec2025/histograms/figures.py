"""The figures of the histograms: from their arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.papers.ormaniec2025.histograms.study import BLOCKS, published

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.papers.ormaniec2025.histograms.study import Bars, Histograms

COLORS = {"L0.W_V": "#7570b3", "L0.W_Q": "#1b9e77"}  # the paper's


def draw(result: Histograms) -> dict[str, Figure]:
    """With softmax, one above the other; without, side by side."""
    return {"histogram_classical": _classical(result), "histogram_linear": _linear(result)}


def _classical(result: Histograms) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(7, 5.4), layout="constrained", sharex=True)
    for ax, block in zip(axes, BLOCKS, strict=True):
        _bars(ax, result.of("softmax", block), label="measured")
        _outline(ax, block)
        _mark_median(ax, result.of("softmax", block))
        _style(ax, block)
        ax.legend(frameon=False, fontsize=10, loc="upper left")
    axes[-1].set_xlabel("|entry| of the Hessian block")
    figure.supylabel("number of entries", fontsize=11)
    return figure


def _linear(result: Histograms) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for ax, block in zip(axes, BLOCKS, strict=True):
        _bars(ax, result.of("softmax", block), label="with softmax", alpha=0.35)
        _bars(ax, result.of("linear", block), label="without softmax")
        _outline(ax, block)
        _style(ax, block)
        ax.set_xlabel("|entry| of the Hessian block")
    low, high = zip(*(ax.get_xlim() for ax in axes), strict=True)
    for ax in axes:
        ax.set_xlim(min(low), max(high))
    axes[0].legend(frameon=False, fontsize=10, loc="upper left")
    axes[1].legend(frameon=False, fontsize=10, loc="upper right")
    axes[0].set_ylabel("number of entries")
    return figure


def _bars(ax: Axes, bars: Bars, **style: Any) -> None:
    ax.bar(
        bars.edges[:-1], bars.counts, np.diff(bars.edges), align="edge", color=COLORS[bars.block],
        edgecolor="white", linewidth=0.4, **style,
    )  # fmt: skip


def _outline(ax: Axes, block: str) -> None:
    """The published bars."""
    rows = [row for row in published() if row["block"] == block]
    edges = [float(row["edge_lo"]) for row in rows] + [float(rows[-1]["edge_hi"])]
    ax.stairs([int(row["count"]) for row in rows], edges, color="black", lw=1.1, label="published, softmax")


def _mark_median(ax: Axes, bars: Bars) -> None:
    median = float(np.median(bars.entries))
    ax.axvline(median, color="0.2", lw=1, ls="--")
    words = f"- - median {median:.2g}, {len(bars.entries):,} entries"
    ax.text(0.985, 0.93, words, transform=ax.transAxes, fontsize=9, color="0.25", va="top", ha="right")


def _style(ax: Axes, block: str) -> None:
    ax.set_xscale("log")
    ax.set_title(block, fontsize=12, loc="left", color=COLORS[block])
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.02)
