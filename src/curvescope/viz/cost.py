"""Time and memory of several contenders, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from curvescope.core.parts import MATRICES
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, OTHERS = style.BLUE, "0.72"
_OWN = ("gradient", *MATRICES)


def bars(
    names: Sequence[str], ratios: Sequence[tuple[float, float, float]], memory: Sequence[float] | None
) -> Figure:
    """Horizontal bars of time in gradients (median, with a line from least to most), and of peak GiB.

    Names of our own contenders begin with gradient or the name of a matrix. Memory that is nan has no bar.
    """
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, 1 if memory is None else 2, figsize=(8, 0.45 * len(names) + 1.4), sharey=True, squeeze=False
    )
    colors = [OURS if name.replace(",", "").split()[0] in _OWN else OTHERS for name in names]
    rows = range(len(names))
    left = axes[0, 0]
    left.barh(rows, [m for m, _, _ in ratios], color=colors)
    left.hlines(rows, [low for _, low, _ in ratios], [high for _, _, high in ratios], color="black", lw=1)
    left.set_yticks(rows, names)
    left.invert_yaxis()
    left.set_xlabel("time of one product, in gradients")
    left.axvline(1, color="black", lw=0.6, ls=":")
    for row, (median, _, high) in zip(rows, ratios, strict=True):
        left.annotate(
            f"{median:.2f}", (max(median, high), row), (4, 0), textcoords="offset points", va="center"
        )
    left.margins(x=0.12)
    if memory is not None:
        right = axes[0, 1]
        right.barh(rows, memory, color=colors)
        right.set_xlabel("peak memory, GiB")
        right.margins(x=0.15)
        for row, amount in zip(rows, memory, strict=True):
            if amount == amount:
                right.annotate(
                    f"{amount:.1f}", (amount, row), (4, 0), textcoords="offset points", va="center"
                )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure
