"""The figures of the study `taylor`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.operators.taylor.expansion import NAMES
from curvescope.studies.taylor.words import key
from curvescope.viz import slices
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.operators import LossLine
    from curvescope.studies.taylor.descent import Descent
    from curvescope.studies.taylor.study import SettledPart, Taylor

ROOM = 0.35  # of the range of what was taken, that a prediction may leave it by before its line ends


def draw(found: Taylor) -> dict[str, Figure]:
    """A figure for every line, all radii, the plane, and the descents."""
    figures = {"reach": _reach(found)}
    figures |= {key(name): _line(name, one) for name, one in found.lines.items()}
    if found.plane is not None:
        figures["plane"] = _plane(found)
    if found.predicted is not None:
        figures["trajectories"] = _trajectories(found)
    if found.settled is not None:
        figures["critical"] = _critical(found.settled)
    return figures


def _panels(count: int, width: float = 10.5, height: float = 3.9) -> tuple[Figure, Any]:
    import matplotlib.pyplot as plt

    return plt.subplots(1, count, figsize=(width, height), layout="constrained", squeeze=False)


def _line(name: str, one: LossLine) -> Figure:
    figure, axes = _panels(2)
    left, right = axes[0]
    one.plot(left)
    left.set_title(f"loss along a line: {name}", fontsize=10, loc="left")
    left.set_xlabel(f"t, in units of ‖d‖ = {one.length:.3g}")
    differences = {NAMES[order]: one.loss - one.expansion.predicted(one.t, order) for order in one.orders}
    allowed = one.agreement.tolerance * one.expansion.terms(one.t)
    slices.errors(right, one.t, differences, allowed, one.agreement.rounding)
    return figure


def _reach(found: Taylor) -> Figure:
    """A row per direction and prediction; ahead filled, behind hollow."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    names = list(found.lines)
    figure, ax = plt.subplots(figsize=(8.0, 1.5 + 0.5 * len(names)), layout="constrained")
    for i, one in enumerate(found.lines.values()):
        for j, order in enumerate(one.orders):
            y, color = i + 0.22 * (j - 0.5) * (len(one.orders) > 1), slices.COLORS[NAMES[order]]
            for side, radius in one.radii[NAMES[order]].items():
                at = radius.value * one.length
                if not np.isfinite(at):
                    continue
                beyond = np.isinf(radius.high)
                inside = color if side == "ahead" else "white"
                ax.plot(at, y, ">" if beyond else "o", color=color, mfc=inside, ms=6)
    ax.set_xscale("log")
    ax.set_yticks(range(len(names)), names, fontsize=9)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="x", color="0.92")
    ax.set_axisbelow(True)
    ax.set_xlabel("distance up to which the prediction holds")
    handles = [
        Line2D([], [], ls="", marker="o", color=slices.COLORS[n], mfc=m, label=f"{n}, {s}")
        for n in {NAMES[o]: 0 for one in found.lines.values() for o in one.orders}
        for s, m in (("ahead", slices.COLORS[n]), ("behind", "white"))
    ]
    figure.legend(handles=handles, fontsize=8, frameon=False, ncols=4, loc="outside upper center")
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def _plane(found: Taylor) -> Figure:
    p = found.plane
    assert p is not None
    figure, axes = _panels(1, 6.6, 5.2)
    names = ("top eigenvector", "−∇L, orthogonal to it")
    p.plot(axes[0][0], names)
    return figure


def _trajectories(found: Taylor) -> Figure:
    figure, axes = _panels(2)
    predicted = found.predicted
    assert predicted is not None
    left, right = axes[0]
    _pairs(
        left, found.descents, [found.loss + d.change for d in found.descents], found.loss + predicted.change
    )
    _pairs(right, found.descents, [d.gradient_norm for d in found.descents], predicted.gradient_norm)
    left.plot([], [], "--", color="0.4", lw=1.1, label="predicted")
    left.set_title("loss", fontsize=10, loc="left")
    right.set_title("norm of the gradient", fontsize=10, loc="left")
    left.legend(fontsize=8, frameon=False, title="learning rate / (2/λ_max)", title_fontsize=8)
    return figure


def _pairs(ax: Axes, descents: list[Descent], taken: list[np.ndarray], predicted: np.ndarray) -> None:
    """Solid lines, dashed ones of the same color; the range is that of what was taken."""
    values = np.concatenate([x[np.isfinite(x)] for x in taken])
    room = ROOM * ((values.max() - values.min()) or 1.0)
    low, high = values.min() - room, values.max() + room
    low = max(low, 0.0) if values.min() >= 0 else low
    for i, one in enumerate(descents):
        color = PALETTE[i % len(PALETTE)]
        ax.plot(taken[i], color=color, lw=1.4, label=f"{one.share:g}")
        ax.plot(predicted[i], "--", color=color, lw=1.1)
    ax.set_ylim(low, high)
    ax.set_xlabel("step")
    ax.spines[["top", "right"]].set_visible(False)


def _critical(own: SettledPart) -> Figure:
    figure, axes = _panels(2)
    left, right = axes[0]
    for i, one in enumerate(own.descents):
        color, k = PALETTE[i % len(PALETTE)], np.arange(len(one.change))
        label = f"{one.share:g}"
        left.plot(np.abs(one.along / one.along[0]), color=color, lw=2.2, label=label)
        left.plot(np.abs(1.0 - 2 * one.share) ** k, ":", color="0.1", lw=1.1)
        right.plot(one.change, color=color, lw=2.2, label=label)
        right.plot(own.predicted.change[i], ":", color="0.1", lw=1.1)
    left.plot([], [], ":", color="0.1", lw=1.1, label="predicted")
    left.set_yscale("log")
    left.set_ylim(bottom=max(float(left.get_ylim()[0]), 1e-9))
    _signed_decades(right, [one.change for one in own.descents])
    left.set_title("gradient along the top eigenvector, over its start", fontsize=10, loc="left")
    right.set_title("change of the loss without its slope", fontsize=10, loc="left")
    left.legend(fontsize=8, frameon=False, title="learning rate / (2/λ_max)", title_fontsize=8)
    for ax in (left, right):
        ax.set_xlabel("step")
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def _signed_decades(ax: Axes, curves: list[np.ndarray]) -> None:
    """A logarithmic axis for both signs, linear up to the power of ten above the smallest curve."""
    sizes = [float(np.nanmax(np.abs(curve))) for curve in curves]
    known = [size for size in sizes if size > 0]
    if not known:
        return
    first, last = (int(np.ceil(np.log10(f(known)))) for f in (min, max))
    ax.set_yscale("symlog", linthresh=10.0**first)
    powers = [10.0**e for e in range(first, last + 1)]
    falls = [-p for p in powers if any(float(np.nanmin(curve)) < -p / 10 for curve in curves)]
    ticks = [*falls[::-1], 0.0, *powers]
    ax.set_yticks(ticks, [f"{tick:.0e}" if tick else "0" for tick in ticks], minor=False)
    ax.set_yticks([], minor=True)
