"""The figure of the study `optimizers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.optimizers.comparison import band
from curvescope.studies.optimizers.course import Course
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.optimizers.study import Compared

FEW = 4  # seeds that a band is drawn of
LABELS = {"steps": "steps", "work": "work, in gradients", "seconds": "processor time, s"}
COLORS = {
    "sgd": style.GRAY, "adamw": "black", "newton_cg": style.BLUE, "sharpness_gd": style.ORANGE,
    "block_sgd": style.TEAL, "hutchinson_adam": style.PLUM, "clipped_newton": style.GOLD,
    "kfac_descent": style.PINK,
}  # fmt: skip


def draw(result: Compared) -> dict[str, Figure]:
    """By name."""
    import matplotlib.pyplot as plt

    rows = len(result.arenas)
    figure, axes = plt.subplots(
        rows, len(LABELS), figsize=(11, 3.1 * rows + 0.4), layout="constrained", squeeze=False, sharey="row"
    )
    for row, arena in zip(axes, result.arenas, strict=True):
        for ax, axis in zip(row, LABELS, strict=True):
            _panel(ax, result, arena, axis)
        row[0].set_ylabel(f"{arena}: held-out loss", fontsize=9)
    axes[0][-1].legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return {"courses": figure}


def _curves(ax: Axes, courses: Sequence[Course], axis: str, look: dict[str, Any]) -> None:
    """A mean with its band; of few seeds, whose band would fill the panel, every run by itself."""
    if len(courses) < FEW:
        for course in courses:
            there = np.isfinite(course.loss)
            ax.plot(getattr(course, axis)[there], course.loss[there], lw=1.0, **look)
            look = look | {"label": "_"}  # one entry of the legend
        return
    x, mean, low, high = band(courses, axis)
    there = np.isfinite(mean)
    ax.plot(x[there], mean[there], lw=1.4, **look)
    ax.fill_between(x[there], low[there], high[there], color=look["color"], alpha=0.15, lw=0)


def _panel(ax: Axes, result: Compared, arena: str, axis: str) -> None:
    for name in result.optimizers:
        _curves(ax, result.of(arena, name), axis, {"color": COLORS[name], "label": name})
    top = max(float(course.loss[0]) for name in result.optimizers for course in result.of(arena, name))
    least = min(float(course.loss.min()) for name in result.optimizers for course in result.of(arena, name))
    ax.set_ylim(least - 0.05 * (top - least), top + 0.15 * (top - least))
    ax.set_xlabel(LABELS[axis], fontsize=9)
    ax.set_xlim(left=0)
    ax.tick_params(labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)
