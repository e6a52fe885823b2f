"""The figures of the gap: two families over training, and those of the bundled model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.papers.singh2025.gap.claims import LOSS, gaps
from curvescope.papers.singh2025.gap.courses import FAMILIES, TASKS
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.papers.singh2025.gap.study import Gaps

NAMES = {"transformer": "Transformer", "mlp": "MLP"}


def draw(result: Gaps) -> dict[str, Figure]:
    """The families in three panels for each loss; then the bundled model's own figures."""
    own = {f"bundled_{name}": figure for name, figure in result.bundled.figures().items()}
    return {"families": _families(result), **own}


def _families(result: Gaps) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 6.6), layout="constrained")
    for (left, middle, right), task in zip(axes, TASKS, strict=True):
        for i, family in enumerate(FAMILIES):
            color = PALETTE[1 - i]
            _missed(left, result, family, task, color)
            _against_loss(middle, result, family, task, color)
            _distances(right, result, family, task, color)
        left.set_title(f"{LOSS[task]}: λ_max that the GGN misses", fontsize=10, loc="left")
        left.set(yscale="log", ylabel="|1 − λ_max(H_o)/λ_max(H)|")
        left.set_xticks(range(len(result.steps)), [str(step) for step in result.steps])
        left.set_xlabel("steps")
        middle.set(xscale="log", yscale="log", xlabel="loss", ylabel="‖H_f‖/‖H‖")
        middle.set_title("functional share against the loss", fontsize=10, loc="left")
        right.set(xscale="log", yscale="log", xlabel="functional share", ylabel="W₁ / (‖H‖/√n)")
        right.set_title("distance of the spectra, and its bound", fontsize=10, loc="left")
        ends = np.array(right.get_xlim())
        right.plot(ends, ends, lw=0.8, color="0.5", label="bound")
        for ax in (left, middle, right):
            ax.legend(fontsize=8, frameon=False)
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(lw=0.3, color="0.9")
    return figure


def _missed(ax: Axes, result: Gaps, family: str, task: str, color: str) -> None:
    values = np.array([gaps(result, family, task, step) for step in result.steps])  # (steps, seeds)
    x = np.arange(len(result.steps))
    ax.plot(x, values, "o", ms=3, color=color, alpha=0.5)
    ax.plot(x, np.median(values, axis=1), "-", lw=1.5, color=color, label=NAMES[family])


def _against_loss(ax: Axes, result: Gaps, family: str, task: str, color: str) -> None:
    for place in result.places(family, task):
        pairs = [result.pair(place, step) for step in result.steps]
        label = NAMES[family] if not place.seed else None
        shares = [pair.share().value for pair in pairs]
        ax.plot([pair.loss for pair in pairs], shares, "-o", ms=3, lw=0.8, color=color, label=label)


def _distances(ax: Axes, result: Gaps, family: str, task: str, color: str) -> None:
    pairs = [result.pair(place, step) for place in result.places(family, task) for step in result.steps]
    x, y = [pair.share().value for pair in pairs], [pair.wasserstein().value for pair in pairs]
    ax.plot(x, y, "o", ms=3, color=color, label=NAMES[family])
