"""The figures of the study `why_adam`: from its arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.why_adam.claims import correlations
from curvescope.studies.why_adam.comparison import contrast, verdict
from curvescope.studies.why_adam.curvature import MEASURES
from curvescope.studies.why_adam.networks import CHOICES
from curvescope.studies.why_adam.settings import CHECKPOINTS
from curvescope.studies.why_adam.work import OPTIMIZERS
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.why_adam.study import WhyAdam

KINDS = {"softmax": style.BLUE, "linear": style.ORANGE, "mlp": style.TEAL}
NAMES = {"adam": "Adam", "sgd": "SGD"}
LABELS = {
    "sizes": "sizes of blocks: spread of log₁₀ mean |λ|",
    "spectra": "spectra of blocks: mean divergence, bits",
    "entries": "inside blocks: spread of log₁₀ |diagonal|",
}


def draw(result: WhyAdam) -> dict[str, Figure]:
    """By name."""
    return {"gap": _gap(result), "along": _along(result), "tuning": _tuning(result)}


def _style(name: str) -> dict[str, Any]:
    """Color: attention or MLP. Shape: single or merged, or depth. Filled: with norms."""
    choice = CHOICES[name]
    mlp = choice.family == "mlp"
    color = KINDS["mlp" if mlp else choice.attention]
    shape = {1: "^", 3: "D"}[choice.hidden] if mlp else "s" if choice.merged else "o"
    return {
        "color": color,
        "marker": shape,
        "ms": 6,
        "mfc": color if choice.norm else "white",
        "mec": color,
    }


def _panels(rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    """A figure with its axes."""
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, layout="constrained", **options)


def _gap(result: WhyAdam) -> Figure:
    figure, axes = _panels(1, 3, figsize=(12.5, 4.2), sharey=True)
    ranked = {
        one.measure: one.found for one in correlations(result) if (one.when, one.among) == ("start", "all")
    }
    for ax, measure in zip(axes, MEASURES, strict=True):
        for name in result.configurations:
            x, y = contrast(result.heterogeneity(measure, "start", [name])), contrast(result.gaps([name]))
            bars = {"xerr": _ends(x), "yerr": _ends(y), "lw": 0, "elinewidth": 0.9, "capsize": 2}
            ax.errorbar(x[0], y[0], **bars, **_style(name), label=name)
        rho = ranked[measure]
        ax.set_title(f"at the start: ρ = {rho.words}, {verdict(rho.low, rho.high)}", fontsize=9, loc="left")
        ax.axhline(0, color="0.7", lw=0.8, zorder=0)
        ax.set_xlabel(LABELS[measure], fontsize=9)
        _plain(ax)
    axes[0].set_ylabel("gap: log₁₀ loss with SGD / with Adam", fontsize=9)
    _legend(figure, axes[0])
    return figure


def _along(result: WhyAdam) -> Figure:
    figure, axes = _panels(2, 3, figsize=(12.5, 6.6), sharex=True, sharey="col")
    where = np.array([0.0, *(100 * share for share in CHECKPOINTS)])
    for row, optimizer in zip(axes, OPTIMIZERS, strict=True):
        moments = ["start", *(f"{optimizer} {share:.0%}" for share in CHECKPOINTS)]
        for ax, measure in zip(row, MEASURES, strict=True):
            for i, name in enumerate(result.configurations):
                each = [contrast(result.heterogeneity(measure, when, [name])) for when in moments]
                bars = np.hstack([_ends(one) for one in each])
                x = where + 0.9 * (i - len(result.configurations) / 2)
                style = _style(name) | {"ms": 4.5}
                ax.errorbar(x, [one[0] for one in each], bars, **style, lw=0.9, elinewidth=0.6, label=name)
            ax.set_title(f"{NAMES[optimizer]}, {LABELS[measure]}", fontsize=9, loc="left")
            ax.set_xticks(where, [f"{x:.0f}" for x in where])
            _plain(ax)
    for ax in axes[-1]:
        ax.set_xlabel("share of the run, %", fontsize=9)
    _legend(figure, axes[0, 0])
    return figure


def _tuning(result: WhyAdam) -> Figure:
    columns = min(4, len(result.configurations))
    rows = -(-len(result.configurations) // columns)
    size = (3 * columns, 2.3 * rows)
    figure, axes = _panels(rows, columns, figsize=size, squeeze=False, sharex=True, sharey=True)
    for ax in axes.flat[len(result.configurations) :]:
        ax.set_visible(False)
    for ax, name in zip(axes.flat, result.configurations, strict=False):
        for i, optimizer in enumerate(OPTIMIZERS):
            run = result.runs[f"{name}/{optimizer}"]
            known = np.isfinite(run.final)
            for s, final in enumerate(run.final):
                ax.plot(run.rates[known[s]], final[known[s]], ".", ms=3, alpha=0.5, color=PALETTE[i])
            whole = known.all(axis=0)
            mean = run.final[:, whole].mean(axis=0)
            ax.plot(
                run.rates[whole],
                mean,
                ("o-", "s-")[i],
                lw=1.2,
                ms=3,
                color=PALETTE[i],
                label=NAMES[optimizer],
            )
        ax.set_xscale("log")
        ax.set_ylim(0, 3)
        ax.set_title(name, fontsize=9, loc="left")
        _plain(ax)
    for ax in axes[:, 0]:
        ax.set_ylabel("final loss", fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("learning rate", fontsize=9)
    axes[0, 0].legend(fontsize=8, frameon=False)
    return figure


def _ends(interval: tuple[float, float, float]) -> np.ndarray:
    """Lengths of both halves of a bar, (2, 1)."""
    mean, low, high = interval
    return np.nan_to_num(np.array([[mean - low], [high - mean]]), nan=0.0, posinf=0.0, neginf=0.0)


def _legend(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8, frameon=False)


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
