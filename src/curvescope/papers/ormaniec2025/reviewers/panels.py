"""What the figures are put together from, and those of questions 5 and 7."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.papers.ormaniec2025.reviewers.questions.merged import RATES, WAYS, Curved, Trained
from curvescope.papers.ormaniec2025.reviewers.questions.softmax import NAMES, Heads
from curvescope.papers.ormaniec2025.reviewers.slopes import Mean, mean_of, ratio_of
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.papers.ormaniec2025.reviewers.study import Reviewers


def row_of(number: int, *, size: tuple[float, float], **options: Any) -> tuple[Figure, np.ndarray]:
    """A figure with panels side by side."""
    import matplotlib.pyplot as plt

    return plt.subplots(1, number, figsize=size, layout="constrained", **options)


def band(ax: Axes, x: np.ndarray, curves: np.ndarray, *, linear: bool = False, **style: Any) -> None:
    """Mean of curves (seeds, x) with its interval; geometric, over what is positive, unless `linear`."""
    known = np.isfinite(curves).all(0) & (linear | (curves > 0).all(0))
    if not known.any():
        return
    of = mean_of if linear else ratio_of
    means = np.array([of(column) for column in curves[:, known].T])
    ax.plot(x[known], means[:, 0], lw=1.4, **style)
    ax.fill_between(x[known], means[:, 1], means[:, 2], color=style["color"], alpha=0.18, lw=0)


def dots(
    ax: Axes, means: Sequence[Mean], places: Any, *, color: Any, label: str = "", upright: bool = False
) -> None:
    """Means with their intervals, side by side if `upright`."""
    values = np.array(means)
    errors = np.nan_to_num(np.abs(values[:, 1:] - values[:, :1]).T)
    style = {"fmt": "o", "ms": 4, "lw": 1, "color": color, "label": label or None}
    if upright:
        ax.errorbar(places, values[:, 0], yerr=errors, **style)
    else:
        ax.errorbar(values[:, 0], places, xerr=errors, **style)


def logarithmic(ax: Axes) -> None:
    """Both axes."""
    ax.set_xscale("log")
    ax.set_yscale("log")
    plain(ax)


def plain(ax: Axes) -> None:
    """No frame, faint grid."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(lw=0.3, color="0.9")


def draw_merged(result: Reviewers) -> Figure:
    """Indefiniteness, and training with each optimizer."""
    curvature = result.of(Curved)["merged.curvature"]
    figure, axes = row_of(1 + len(RATES), size=(12, 3.6))
    for way, words in enumerate(WAYS):
        band(axes[0], curvature.sigma, curvature.negative[:, :, way], color=PALETTE[way], label=words)
        for ax, how in zip(axes[1:], RATES, strict=True):
            losses = result.of(Trained)[f"merged.{how}"].best()[way]
            band(ax, np.arange(1, losses.shape[-1] + 1), losses, linear=True, color=PALETTE[way], label=words)
    for ax, how in zip(axes[1:], RATES, strict=True):
        ax.set_title(f"loss, {how}", fontsize=10, loc="left")
        ax.set_xscale("log")
        ax.set_xlabel("step")
        plain(ax)
    logarithmic(axes[0])
    axes[0].set_title("−λ_min(H)/λ_max(H_o)", fontsize=10, loc="left")
    axes[0].set_xlabel("σ")
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def draw_softmax(result: Reviewers) -> Figure:
    """Ratios of all blocks over temperature, against both kinds of attention without softmax."""
    heads = result.of(Heads)["softmax"]
    figure, axes = row_of(2, size=(10, 3.8), sharey=True)
    titles = {"linear": "against the scores as weights", "mean": "against their mean over tokens"}
    for ax, (over, title) in zip(axes, titles.items(), strict=True):
        for i, block in enumerate(NAMES):
            ratios = np.stack([heads.ratio(block, t, over=over) for t in range(len(heads.temperatures))], 1)
            color = (*PALETTE, "0.35")[i]
            band(
                ax,
                heads.temperatures,
                ratios,
                color=color,
                label=f"({block[0]}, {block[1]})",
                marker="o",
                ms=3.5,
            )
        logarithmic(ax)
        ax.axhline(1, color="0.4", lw=0.8, ls=":")
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_xlabel("temperature τ")
    axes[0].set_ylabel("‖H(block)‖ with softmax / without")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    return figure
