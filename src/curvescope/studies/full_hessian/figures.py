"""The figures of the study `full_hessian`: from its arrays, nothing computed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.full_hessian.claims import INITIAL_SIZE, TRAINED_SIZE
from curvescope.studies.full_hessian.dense import ATTENTION
from curvescope.viz import style
from curvescope.viz.matrix import FLOOR, LABEL, colors, entries_map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.full_hessian.norms import Norms
    from curvescope.studies.full_hessian.study import FullHessian

STAGES = ("initial", "trained")
DECADES = 5  # of the colors of pairs, below the largest


def draw(result: FullHessian) -> dict[str, Figure]:
    """The entries, the pairs of blocks, norms through training, and the stripe with the sizes."""
    return {
        "hessian_entries": _entries(result),
        "hessian_pairs": _pairs(result),
        "hessian_norms": _norms(result),
        "hessian_stripe": _stripe(result),
    }


def _entries(result: FullHessian) -> Figure:
    """Two rows, whole network and attention; two columns, initial and trained; one scale of colors."""
    stages = result.networks[0].stages
    largest = max(float(found.max_abs.max()) for found in stages.values())
    limits = (math.log10(FLOOR), math.log10(largest))
    figure, axes = _panels(2, 2, (15, 14.6))
    image = None
    for column, (stage, found) in zip(axes.T, stages.items(), strict=True):
        image = entries_map(column[0], found.picture, found.names, found.pixels, limits)
        column[0].set_title(f"Hessian, {stage}", fontsize=15, pad=8)
        sizes = [found.sizes[found.names.index(name)] for name in ATTENTION]
        entries_map(column[1], colors(found.attention), ATTENTION, sizes, limits)
        column[1].set_title(f"Hessian (self-attention), {stage}", fontsize=15, pad=8)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, pad=0.02)  # pyright: ignore[reportArgumentType]
    bar.set_label(LABEL, fontsize=12)
    return figure


def _pairs(result: FullHessian) -> Figure:
    """Root mean square entries as numbers, geometric means over the networks."""
    means = {
        stage: np.exp(np.mean([np.log(n.stages[stage].rms + FLOOR**2) for n in result.networks], axis=0))
        for stage in STAGES
    }
    names = [name.removeprefix("L0.") for name in result.networks[0].initial.names]
    top = max(float(values.max()) for values in means.values())
    figure, axes = _panels(1, 2, (17.5, 8.4))
    least = top * 10.0**-DECADES
    image = None
    for ax, (stage, values) in zip(axes, means.items(), strict=True):
        image = ax.imshow(values, norm="log", vmin=least, vmax=top, cmap="viridis", interpolation="nearest")
        for (i, j), value in np.ndenumerate(values):
            color = "white" if value < least * 10 ** (0.6 * DECADES) else "black"
            ax.text(j, i, _short(float(value)), ha="center", va="center", fontsize=6.5, color=color)
        ax.set_xticks(range(len(names)), names, rotation=90, fontsize=9)
        ax.set_yticks(range(len(names)), names, fontsize=9)
        ax.tick_params(length=0)
        ax.set_title(stage, fontsize=13)
    figure.colorbar(image, ax=axes, label="root mean square entry", shrink=0.8)  # pyright: ignore[reportArgumentType]
    return figure


def _short(value: float) -> str:
    """Two digits: 0.015, 4.4e-3."""
    if 0.01 <= value < 10:
        return f"{value:.2g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _norms(result: FullHessian) -> Figure:
    figure, axes = _panels(1, 2, (12.5, 4.8))
    every = [network.norms for network in result.networks]
    _curves(axes[0], result, every, "weights", "norm of the parameters")
    _curves(axes[1], result, every, "hessian", "Frobenius norm of the Hessian block")
    axes[1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _curves(ax: Axes, result: FullHessian, every: list[Norms], name: str, label: str) -> None:
    """Geometric means over networks with bands from the least to the largest; step 0 at its own place."""
    steps = every[0].steps
    place = np.maximum(steps, 0.5)
    for g, group in enumerate(every[0].groups):
        logs = np.log(np.stack([getattr(one, name)[:, g] for one in every]))
        low, mean, high = (np.exp(f(logs, axis=0)) for f in (np.min, np.mean, np.max))
        ax.plot(place, mean, "o-", ms=3, lw=1.3, color=style.MANY[g], label=group)
        ax.fill_between(place, low, high, color=style.MANY[g], alpha=0.13, lw=0)
    for network in result.networks:
        ax.axvline(network.training.trained_step, color="0.5", ls=":", lw=0.8)
    ax.set_xscale("log")
    if name == "weights":
        ax.set_ylim(bottom=0)
    else:
        ax.set_yscale("log")
    powers = [10.0**i for i in range(math.floor(math.log10(max(int(steps[-1]), 1))) + 1)]
    ax.set_xticks([0.5, *powers], ["0", *(f"{power:g}" for power in powers)])
    ax.minorticks_off()
    ax.set_xlabel("step")
    ax.set_ylabel(label)
    _plain(ax)


def _stripe(result: FullHessian) -> Figure:
    figure, axes = _panels(1, 2, (10, 3.8))
    ratios = [[n.initial.stripe_ratio, n.trained.stripe_ratio] for n in result.networks]
    sizes = [[n.initial.max_abs.max(), n.trained.max_abs.max()] for n in result.networks]
    _slopes(axes[0], ratios, "QK block: on the stripe / off it")
    axes[0].axhline(1, color="0.6", lw=0.8, ls="--")
    _slopes(axes[1], sizes, "largest |entry|")
    for x, power in enumerate((INITIAL_SIZE, TRAINED_SIZE)):
        axes[1].plot([x - 0.12, x + 0.12], [10**power] * 2, color=style.ORANGE, lw=2)
    axes[1].plot([], [], color=style.ORANGE, lw=2, label="end of the published color bar")
    axes[1].set_yscale("log")
    axes[1].legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def _slopes(ax: Axes, rows: list[list[float]], label: str) -> None:
    """A line per network from initial to trained."""
    for row in rows:
        ax.plot([0, 1], row, "o-", color=style.BLUE, ms=4, lw=1, alpha=0.8)
    ax.set_xticks([0, 1], STAGES)
    ax.set_xlim(-0.4, 1.4)
    ax.set_ylabel(label)
    _plain(ax)


def _panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure and the array of its axes."""
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained")


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(lw=0.3, color="0.9")
