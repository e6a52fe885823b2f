"""The figures of the study `influence`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.studies.influence.correlations import over_queries
from curvescope.studies.influence.retraining import GGN_NAME, HESSIAN
from curvescope.studies.influence.tables import short
from curvescope.viz.style import MANY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.influence.study import Influence

PANELS = ((GGN_NAME, "near"), (HESSIAN, "near"), (GGN_NAME, "again"))
TITLES = {"near": "trained on from the minimum", "again": "trained again from the start"}


def draw(result: Influence) -> dict[str, Figure]:
    """Scores by query, and predictions against retraining where there is any."""
    found = {"scores": _scores(result)}
    return found | ({"retraining": _retraining(result)} if result.comparisons else {})


def _scores(result: Influence) -> Figure:
    import matplotlib.pyplot as plt

    count = len(result.scores)
    figure, axes = plt.subplots(1, count, figsize=(5.2 * count, 4), layout="constrained", squeeze=False)
    for ax, scores, query in zip(axes[0], result.scores, result.queries, strict=True):
        order = np.argsort(-scores.values[0], kind="stable")
        x = np.arange(1, len(order) + 1)
        for d, unit in enumerate(result.units):
            values, error = scores.values[d, order], scores.error[d, order]
            label = f"δ = {unit:g} × mean diagonal"
            ax.errorbar(x, values, error, fmt="o-" if d == 0 else ".", ms=4, lw=0.8, label=label, capsize=2)
        ax.axhline(0, color="0.6", lw=0.8)
        ax.set(
            xlabel="training sequence, by score at the first δ", ylabel="predicted change of the query's loss"
        )
        ax.set_title(short(query, 52), fontsize=9, loc="left")
        _plain(ax)
    axes[0, 0].legend(fontsize=8, frameon=False)
    return figure


def _retraining(result: Influence) -> Figure:
    import matplotlib.pyplot as plt

    rows = len(result.comparisons)
    figure, axes = plt.subplots(
        rows, len(PANELS), figsize=(11.5, 3.9 * rows), layout="constrained", squeeze=False
    )
    for row, (name, one) in zip(axes, result.comparisons.items(), strict=True):
        for ax, (method, trained) in zip(row, PANELS, strict=True):
            predicted, measured = one.predicted[method], getattr(one, trained)
            _against(ax, predicted, measured, one.elsewhere & (trained == "again"))
            rho = over_queries(predicted, measured, draws=result.draws, seed=result.seed)
            ax.set_title(f"{name}, {method}, {TITLES[trained]}\nρ = {rho.words}", fontsize=9, loc="left")
    axes[0, 0].legend(fontsize=7, frameon=False, ncols=2)
    return figure


def _against(ax: Axes, predicted: np.ndarray, measured: np.ndarray, elsewhere: np.ndarray) -> None:
    """Measured against predicted, a color for each query, on axes that are linear near zero."""
    size = np.abs(np.concatenate([predicted.ravel(), measured.ravel()]))
    linear = 10.0 ** np.round(np.log10(np.median(size) or 1e-6))
    end = 1.5 * float(size.max())
    for q, (x, y) in enumerate(zip(predicted, measured, strict=True)):
        for mark, some in (("o", ~elsewhere), ("x", elsewhere)):
            ax.plot(x[some], y[some], mark, ms=4, alpha=0.8, color=MANY[q % len(MANY)])
        ax.plot([], [], "o", ms=4, color=MANY[q % len(MANY)], label=f"query {q + 1}")
    ax.plot([-end, end], [-end, end], "-", color="0.3", lw=0.8, label="equal")
    for axis, scale, limit in (
        (ax.xaxis, ax.set_xscale, ax.set_xlim),
        (ax.yaxis, ax.set_yscale, ax.set_ylim),
    ):
        scale("symlog", linthresh=linear)
        axis.set_ticks([t * linear for t in (-10, -1, 0, 1, 10) if abs(t) * linear <= end])
        limit(-end, end)
    ax.set(xlabel="predicted change", ylabel="measured change")
    _plain(ax)


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
