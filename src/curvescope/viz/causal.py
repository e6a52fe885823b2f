"""What was predicted against what was found, and parts that add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C7")


def agreement(
    ax: Axes, predicted: np.ndarray, found: np.ndarray, kinds: Sequence[str], *, x: str, y: str
) -> Axes:
    """Points (D, A) of D things of some kinds, on axes that are linear near zero, and where both agree."""
    limit = max(float(np.abs([predicted, found]).max()), 1e-12)
    middle = max(np.median(np.abs(found)), 1e-3 * limit)
    decades = 10.0 ** np.arange(np.round(np.log10(middle)), np.log10(limit))
    ticks = [*-decades[::-1], 0.0, *decades]
    for colour, kind in zip(COLOURS, dict.fromkeys(kinds), strict=False):
        own = np.array([k == kind for k in kinds])
        ax.scatter(predicted[own], found[own], s=11, color=colour, alpha=0.7, lw=0, label=kind)
    ax.plot([-limit, limit], [-limit, limit], color="0.5", lw=0.9, ls="--", zorder=0)
    for scale, marks in ((ax.set_xscale, ax.set_xticks), (ax.set_yscale, ax.set_yticks)):
        scale("symlog", linthresh=decades[0] if len(decades) else middle)
        marks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xlim(-1.3 * limit, 1.3 * limit)
    ax.set_ylim(-1.3 * limit, 1.3 * limit)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.legend(fontsize=8, frameon=False, loc="lower right", handletextpad=0.1)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def errors(ax: Axes, sizes: np.ndarray, shares: Mapping[str, Sequence[float]]) -> Axes:
    """Relative errors of predictions against the size of the step, both logarithmic."""
    for name, share in shares.items():
        ax.loglog(sizes, share, marker="o", ms=4, lw=1.3, label=name)
    ax.axhline(1, color="0.7", lw=0.8, ls=":")
    ax.set_xticks(sizes, [f"{a:g}" for a in sizes])
    ax.minorticks_off()
    ax.set_xlabel("|α|, in standard deviations")
    ax.set_ylabel("error, as a share of the change")
    ax.legend(fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def part_bars(ax: Axes, names: Sequence[str], values: np.ndarray, stderr: np.ndarray) -> Axes:
    """One bar for each part, in their order; the colour is that of their kind: head, feed-forward, other."""
    kinds = [
        "head" if ".h" in name else "feed-forward" if name.endswith(".ff") else "other" for name in names
    ]
    for colour, kind in zip(COLOURS, ("head", "feed-forward", "other"), strict=False):
        own = [i for i, k in enumerate(kinds) if k == kind]
        if own:
            ax.bar(
                own,
                values[own],
                yerr=np.nan_to_num(stderr[own]),
                color=colour,
                label=kind,
                error_kw={"lw": 0.8},
            )
    ax.axhline(0, color="0.4", lw=0.8)
    ax.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    ax.set_xlim(-0.7, len(names) - 0.3)
    ax.set_ylabel("part of the right token's logit")
    ax.legend(fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
