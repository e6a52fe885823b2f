"""The figures of the study `factors`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.factors import claims
from curvescope.studies.factors.distances import MEASURES
from curvescope.studies.factors.tables import geometric
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.factors.study import Factors

LOOKS = {
    "identity": (style.GRAY, "o"), "diagonal": (style.GOLD, "s"), "kfac": (style.SKY, "^"),
    "ekfac": (style.BLUE, "v"), "shampoo": (style.PINK, "D"), "shampoo-squared": (style.ORANGE, "P"),
    "block-diagonal": (style.TEAL, "X"), "ggn": ("black", "*"),
}  # fmt: skip
LABELS = {
    "frobenius": "relative error from the GGN",
    "angle": "angle from the GGN, degrees",
    "divergence": "divergence from the GGN",
    "lost": "lost decrease of the GGN's model",
    "frobenius_hessian": "relative error from the Hessian",
    "angle_hessian": "angle from the Hessian, degrees",
}
TOPS = {"angle": 95, "angle_hessian": 100, "lost": 1.03}  # where an interval may end beyond what can be


def draw(result: Factors) -> dict[str, Figure]:
    """By name."""
    return {"distances": _distances(result), "blocks": _blocks(result), "outcomes": _outcomes(result)}


def _panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, np.ndarray]:
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **shared)


def _distances(result: Factors) -> Figure:
    figure, axes = _panels(2, 3, (11, 6.2), sharex=True)
    x = np.arange(len(result.checkpoints))
    for ax, measure in zip(axes.T.flat, _columns(), strict=True):
        for m, name in enumerate(result.approximations):
            own = result.distance(measure)[..., m]  # (S, C)
            mean, low, high = np.array([claims.mean_of(column) for column in own.T]).T
            color, mark = LOOKS[name]
            ax.plot(x, mean, marker=mark, ms=4.5, lw=1.2, color=color, label=name)
            ax.fill_between(x, low, high, color=color, alpha=0.1, lw=0)
        ax.set_title(LABELS[measure], fontsize=9, loc="left")
        top = TOPS.get(measure, 1.15 * float(result.distance(measure).max()))
        ax.set_ylim(-0.03 * top, top)
        ax.set_xticks(x, [str(step) for step in result.checkpoints])
        _plain(ax)
    for ax in axes[-1]:
        ax.set_xlabel("steps of training", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, fontsize=8, frameon=False)
    return figure


def _columns() -> tuple[str, ...]:
    """Measures column by column: errors, angles, preconditioners."""
    return "frobenius", "frobenius_hessian", "angle", "angle_hessian", "divergence", "lost"


def _blocks(result: Factors) -> Figure:
    height = 0.34 * len(result.blocks) + 1.7
    figure, axes = _panels(1, 2, (11, height), sharey=True)
    image = None
    for ax, measure in zip(axes[0], ("angle", "angle_hessian"), strict=True):
        values = result.parts[:, -1, MEASURES.index(measure)].mean(axis=0).T  # (B, M)
        image = ax.imshow(values, vmin=0, vmax=90, cmap=style.MAP, aspect="auto")
        for (b, m), value in np.ndenumerate(values):
            ax.text(m, b, f"{value:.0f}", ha="center", va="center", fontsize=8,
                    color=style.ink_at(image, value))  # fmt: skip
        ax.set_title(f"{LABELS[measure]}, block by block", fontsize=9, loc="left")
        ax.set_xticks(range(len(result.approximations)), result.approximations, rotation=30, ha="right")
        ax.set_yticks(range(len(result.blocks)), result.blocks)
        ax.tick_params(labelsize=8, length=0)
    assert image is not None
    figure.colorbar(image, ax=axes, shrink=0.9, pad=0.01).ax.tick_params(labelsize=8)
    return figure


def _outcomes(result: Factors) -> Figure:
    rows, shown = claims.outcomes(result)[::-1], ("frobenius", "angle", "divergence", "lost", "angle_hessian")
    size = 13, 2.7 * len(rows) + 0.5
    figure, axes = _panels(len(rows), len(shown), size, sharey="row", sharex="col")
    for row, outcome in zip(axes, rows, strict=True):
        for ax, measure in zip(row, shown, strict=True):
            _against(ax, result, measure, outcome)
            rho = claims.correlation(result, measure, outcome)
            ax.set_title(f"ρ = {rho.words}", fontsize=8.5, loc="left")
        final = outcome == claims.FINAL
        row[0].set_ylabel("loss at the end" if final else "share of the best decrease", fontsize=9)
    for ax, measure in zip(axes[-1], shown, strict=True):
        ax.set_xlabel(LABELS[measure], fontsize=8.5)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, fontsize=8, frameon=False)
    return figure


def _against(ax: Axes, result: Factors, measure: str, outcome: str) -> None:
    """A point for each approximation, with intervals over seeds in both directions."""
    for m, name in enumerate(result.approximations):
        x = np.array(claims.mean_of(result.distance(measure)[..., m].mean(axis=1)))
        if outcome == claims.FINAL:
            y = np.array(geometric(result.final[:, m]))
        else:
            share = result.decrease[..., m] / result.decrease.max(axis=-1)
            y = np.array(claims.mean_of(share.mean(axis=1)))
        color, mark = LOOKS[name]
        bars = [np.abs(v[1:] - v[0])[:, None] for v in (x, y)]
        if np.isfinite(y[0]):
            ax.errorbar(
                x[:1], y[:1], np.nan_to_num(bars[1]), np.nan_to_num(bars[0]), fmt=mark, ms=6, color=color,
                lw=0.9, label=name,
            )  # fmt: skip
    if outcome == claims.FINAL:
        ax.set_yscale("log")
        for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis("{x:g}")
    _plain(ax)


def _plain(ax: Axes) -> None:
    ax.tick_params(which="both", labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
