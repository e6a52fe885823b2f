"""What the figures are put together from, and those of questions 5 and 7."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.papers.ormaniec2025.reviewers.merged import RATES, WAYS, Curved, Trained
from curvescope.papers.ormaniec2025.reviewers.slopes import Mean, mean_of, ratio_of
from curvescope.papers.ormaniec2025.reviewers.softmax import NAMES, Heads
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.papers.ormaniec2025.reviewers.study import Reviewers


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


def power_lines(ax: Axes, powers: Sequence[int], *, at: tuple[float, float]) -> None:
    """σ to some powers through a point, over a decade, in grey."""
    x = np.array([at[0] / 3, at[0] * 3])
    for power in powers:
        y = at[1] * (x / at[0]) ** power
        ax.plot(x, y, color="0.5", lw=0.9, zorder=0)
        ax.annotate(f"σ$^{power}$", (x[1], y[1]), fontsize=8, color="0.4")


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
    import matplotlib.pyplot as plt

    curvature = result.of(Curved)["merged.curvature"]
    figure, axes = plt.subplots(1, 1 + len(RATES), figsize=(12, 3.6), layout="constrained")
    for way, words in enumerate(WAYS):
        band(axes[0], curvature.sigma, curvature.negative[:, :, way], color=PALETTE[way], label=words)
        for ax, how in zip(axes[1:], RATES, strict=True):
            losses = result.of(Trained)[f"merged.{how}"].best()[way]
            band(ax, np.arange(losses.shape[-1]), losses, linear=True, color=PALETTE[way], label=words)
    for ax, how in zip(axes[1:], RATES, strict=True):
        ax.set_title(f"loss, {how}", fontsize=10, loc="left")
        ax.set_xlabel("step")
        plain(ax)
    logarithmic(axes[0])
    axes[0].set_title("−λ_min(H)/λ_max(H_o)", fontsize=10, loc="left")
    axes[0].set_xlabel("σ")
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def draw_softmax(result: Reviewers) -> Figure:
    """Ratios of all blocks over temperature, against both kinds of attention without softmax."""
    import matplotlib.pyplot as plt

    heads = result.of(Heads)["softmax"]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    titles = {"linear": "against the scores as weights", "mean": "against their mean over tokens"}
    for ax, (over, title) in zip(axes, titles.items(), strict=True):
        for i, block in enumerate(NAMES):
            ratios = np.stack([heads.ratio(block, t, over=over) for t in range(len(heads.temperatures))], 1)
            colour = (*PALETTE, "0.35")[i]
            band(
                ax,
                heads.temperatures,
                ratios,
                color=colour,
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
