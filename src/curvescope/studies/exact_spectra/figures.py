"""The figures of the study `exact_spectra`: spectra, sweeps, condition numbers, gaps of λ_max, pairing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.exact_spectra import ladder, sweeps
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.exact_spectra.study import ExactSpectra
    from curvescope.studies.exact_spectra.sweeps import Sweeps

LINEAR_AXES = (sweeps.ANGLE, sweeps.BIAS, sweeps.LARGE_BIAS)
PANELS = tuple(name for name in sweeps.AXES if name != sweeps.NORM_K)  # ‖w_K‖ does what ‖w_Q‖ does
LABELS = {
    sweeps.ANGLE: "angle between w_Q and w_K (degrees)",
    sweeps.LENGTH: "length of the sequence",
    sweeps.TARGET: "standard deviation of the targets",
    sweeps.OUTLIER: "factor of one token",
    sweeps.LARGE_BIAS: "first-token bias, x₀ = 4",
}
CURVES = {
    "outlier_high": (PALETTE[1], "-", "outliers: largest"),
    "outlier_mid": (PALETTE[1], ":", "middle"),
    "outlier_low": (PALETTE[1], "--", "smallest"),
    "bulk": (PALETTE[0], "-", "bulk |b|"),
    "ggn_lambda_max": (PALETTE[2], "-", "λ_max of the GGN"),
}


def draw(result: ExactSpectra) -> dict[str, Figure]:
    """All figures by name."""
    return {
        "spectra": _spectra(result),
        "sweeps": _sweeps(result),
        "condition": _condition(result),
        "ggn_gap": _gaps(result),
        "pairing": _pairing(result),
    }


def _panels(rows: int, columns: int, *, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained", **options)


def _spectra(result: ExactSpectra) -> Figure:
    """Each case a row: eigenvalues over the largest, a tick in closed form, a ring of the dense Hessian."""
    names, column = list(dict.fromkeys(result.spectra.case)), np.array(result.spectra.case)
    figure, ax = _panels(1, 1, size=(9.5, 0.2 * len(names) + 1.4))
    for y, name in enumerate(reversed(names)):
        closed, dense = result.spectra.closed_form[column == name], result.spectra.numerical[column == name]
        size = np.abs(dense).max() or 1.0
        ax.plot(dense / size, np.full(len(dense), y), "o", ms=6, mfc="none", mec=PALETTE[1], mew=0.9)
        ax.plot(closed / size, np.full(len(closed), y), "|", ms=7, color=PALETTE[0], mew=1.2)
    ax.plot([], [], "|", ms=7, color=PALETTE[0], mew=1.2, label="closed form")
    ax.plot([], [], "o", ms=6, mfc="none", mec=PALETTE[1], label="dense Hessian, double backward")
    ax.set_yticks(range(len(names)), names[::-1], fontsize=7)
    ax.set_ylim(-0.7, len(names) - 0.3)
    ax.set_xlabel("eigenvalue / largest |eigenvalue|", fontsize=9)
    ax.legend(fontsize=8, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    _plain(ax)
    return figure


def _sweeps(result: ExactSpectra) -> Figure:
    figure, axes = _panels(3, 3, size=(11.5, 9.0))
    for ax, varied in zip(axes.flat, PANELS, strict=True):
        one = result.sweeps.of(varied)
        for name, (color, style, label) in CURVES.items():
            _curve(ax, one, name, color, style, label)
        ax.set_yscale("symlog", linthresh=0.01)
        ax.axhline(0, color="0.4", lw=0.7)
        _horizontal(ax, varied)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, frameon=False, ncols=len(CURVES), loc="outside upper center")
    figure.supylabel("eigenvalue (linear between ±0.01)", fontsize=10)
    return figure


def _condition(result: ExactSpectra) -> Figure:
    figure, axes = _panels(3, 3, size=(11.5, 8.2), sharey=True)
    for ax, varied in zip(axes.flat, PANELS, strict=True):
        _curve(ax, result.sweeps.of(varied), "condition", PALETTE[3], "-", None)
        ax.set_yscale("log")
        _horizontal(ax, varied)
    figure.supylabel("condition number", fontsize=10)
    return figure


def _curve(ax: Axes, found: Sweeps, name: str, color: str, style: str, label: str | None) -> None:
    """Medians over seeds, and a band between quartiles."""
    column = getattr(found, name)
    values = np.unique(found.value)
    low, middle, high = np.array(
        [np.nanpercentile(column[found.value == one], (25, 50, 75)) for one in values]
    ).T
    ax.plot(values, middle, style, lw=1.4, color=color, label=label)
    ax.fill_between(values, low, high, color=color, alpha=0.13, lw=0)


def _horizontal(ax: Axes, varied: str) -> None:
    if varied not in LINEAR_AXES:
        ax.set_xscale("log")
    ax.set_xlabel(LABELS.get(varied, varied), fontsize=9)
    _plain(ax)


def _gaps(result: ExactSpectra) -> Figure:
    """For each match a panel: gaps over the weights' scale, a pair of lines for each residual."""
    found = result.gaps.differences()
    matches, scales, residuals = (list(dict.fromkeys(column)) for column in zip(*found, strict=True))
    figure, axes = _panels(1, len(matches), size=(11.5, 4.0), sharey=True, squeeze=False)
    counts = dict(zip(result.gaps.match, result.gaps.num_parameters, strict=True))
    for ax, match in zip(axes[0], matches, strict=True):
        for residual, style in zip(residuals, ("o:", "o--", "o-"), strict=False):
            rows = [found[match, scale, residual] for scale in scales]
            for kind, (color, name) in enumerate(((PALETTE[1], "attention"), (PALETTE[0], "MLP"))):
                x = np.array(scales) * (1.03 if kind else 0.97)
                middle, low, high = np.array([one[kind] for one in rows]).T
                error, label = [middle - low, high - middle], f"{name}, ρ = {residual:g}"
                ax.errorbar(x, middle, error, fmt=style, color=color, ms=4, lw=1.2, label=label)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(scales, [f"{one:g}" for one in scales])
        ax.minorticks_off()
        ax.set_title(f"{match}: {counts[match]} parameters each", fontsize=10, loc="left")
        ax.set_xlabel("scale of the weights", fontsize=9)
        _plain(ax)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, frameon=False, ncols=6, loc="outside lower center")
    axes[0][0].set_ylabel("|λ_max(H_o) − λ_max(H)| / λ_max(H)", fontsize=9)
    return figure


def _pairing(result: ExactSpectra) -> Figure:
    """Left: P on every rung. Right: the share of exact pairs."""
    table = result.pairings.to_frame()
    figure, axes = _panels(1, 2, size=(11.5, 0.3 * len(table) + 1.8), sharey=True)
    sides = (
        ((ladder.ALL, ladder.OUTLIERS, ladder.FUNCTIONAL, ladder.QUERY_KEY), "pairing P"),
        ((ladder.EXACT, ladder.EXACT_FUNCTIONAL, ladder.EXACT_QUERY_KEY), "share of exact pairs"),
    )
    colors = {"H": PALETTE[0], "outliers of H": PALETTE[3], "H_f": PALETTE[1], ladder.QUERY_KEY: PALETTE[2]}
    height = np.arange(len(table))[::-1]
    for ax, (names, label) in zip(axes, sides, strict=True):
        for i, name in enumerate(names):
            y = height + 0.15 * ((len(names) - 1) / 2 - i)
            short = name.removeprefix("exact pairs of ")
            value, low, high = (table[f"{name}{end}"].to_numpy() for end in ("", ", low", ", high"))
            there, color = np.isfinite(value), colors[short]
            error = np.array([value - low, high - value])[:, there]
            ax.errorbar(value[there], y[there], xerr=error, fmt="o", ms=4, lw=1.2, color=color, label=short)
        ax.set_xlim(-0.03, 1.03)
        ax.set_xlabel(label, fontsize=9)
        ax.set_yticks(height, list(table["rung"]), fontsize=8)
        _plain(ax)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, frameon=False, ncols=4, loc="outside upper center")
    return figure


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(lw=0.3, color="0.9")
