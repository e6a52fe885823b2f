"""Figures and captions of the study `exact_spectra`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.number_format import plural
from curvescope.runs.study_result import Line
from curvescope.studies.common.statistics import median_interval
from curvescope.studies.exact_spectra import study
from curvescope.studies.exact_spectra.study import CONTROL_NOTE
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.exact_spectra.study import ExactSpectra, Sweeps

LINEAR_AXES = (study.ANGLE, study.BIAS, study.LARGE_BIAS)
PANELS = tuple(name for name in study.AXES if name != study.NORM_K)  # ‖w_K‖ has the same effect as ‖w_Q‖
LABELS = {
    study.ANGLE: "angle between w_Q and w_K (degrees)",
    study.LENGTH: "length of the sequence",
    study.TARGET: "standard deviation of the targets",
    study.OUTLIER: "factor of one token",
    study.LARGE_BIAS: "first-token bias, x₀ = 4",
}
CURVES = {
    "outlier_high": (PALETTE[1], "-", "outliers: largest"),
    "outlier_mid": (PALETTE[1], ":", "middle"),
    "outlier_low": (PALETTE[1], "--", "smallest"),
    "bulk": (PALETTE[0], "-", "bulk |b|"),
    "ggn_lambda_max": (PALETTE[2], "-", "λ_max of the GGN"),
}


def figures(result: ExactSpectra) -> dict[str, Figure]:
    """Return all figures by name."""
    return {
        "spectra": _spectra(result),
        "sweeps": _sweeps(result),
        "condition": _condition(result),
        "ggn_gap": _gaps(result),
        "pairing": _pairing(result),
    }


def _spectra(result: ExactSpectra) -> Figure:
    """Draw each case as a row of scaled eigenvalues: ticks are closed forms, rings the dense Hessian."""
    names, column = list(dict.fromkeys(result.spectra.case)), np.array(result.spectra.case)
    figure, ax = style.subplots(1, 1, figsize=(9.5, 0.2 * len(names) + 1.4))
    for y, name in enumerate(reversed(names)):
        closed, dense = result.spectra.closed_form[column == name], result.spectra.numerical[column == name]
        size = np.abs(dense).max() or 1.0
        ax.plot(dense / size, np.full(len(dense), y), "o", ms=6, mfc="none", mec=PALETTE[1], mew=0.9)
        ax.plot(closed / size, np.full(len(closed), y), "|", ms=7, color=PALETTE[0], mew=1.2)
    ax.plot([], [], "|", ms=7, color=PALETTE[0], mew=1.2, label="closed form")
    ax.plot([], [], "o", ms=6, mfc="none", mec=PALETTE[1], label="dense Hessian, double backward")
    ax.set_yticks(range(len(names)), names[::-1])
    ax.set(ylim=(-0.7, len(names) - 0.3), xlabel="eigenvalue / largest |eigenvalue|")
    ax.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    ax.grid(visible=True)
    return figure


def _sweeps(result: ExactSpectra) -> Figure:
    figure, axes = style.subplots(3, 3, figsize=(11.5, 9.0))
    for ax, varied in zip(axes.flat, PANELS, strict=True):
        one = result.sweeps.of(varied)
        for name, (color, dash, label) in CURVES.items():
            _curve(ax, one, name, color, dash, label)
        ax.set_yscale("symlog", linthresh=0.01)
        ax.axhline(0, color="0.4", lw=0.7)
        _horizontal(ax, varied)
    style.shared_legend(figure, axes[0][0], loc="outside upper center", ncols=len(CURVES))
    figure.supylabel("eigenvalue (linear between ±0.01)")
    return figure


def _condition(result: ExactSpectra) -> Figure:
    figure, axes = style.subplots(3, 3, figsize=(11.5, 8.2), sharey=True)
    for ax, varied in zip(axes.flat, PANELS, strict=True):
        _curve(ax, result.sweeps.of(varied), "condition", PALETTE[3], "-", None)
        ax.set_yscale("log")
        _horizontal(ax, varied)
    figure.supylabel("condition number")
    return figure


def _curve(ax: Axes, found: Sweeps, name: str, color: str, dash: str, label: str | None) -> None:
    """Draw medians over seeds, and a band between quartiles."""
    column = getattr(found, name)
    values = np.unique(found.value)
    low, middle, high = np.array(
        [np.nanpercentile(column[found.value == one], (25, 50, 75)) for one in values]
    ).T
    ax.plot(values, middle, dash, lw=1.4, color=color, label=label)
    ax.fill_between(values, low, high, color=color, alpha=0.13, lw=0)


def _horizontal(ax: Axes, varied: str) -> None:
    if varied not in LINEAR_AXES:
        ax.set_xscale("log")
    ax.set_xlabel(LABELS.get(varied, varied))
    ax.grid(visible=True)


def _gaps(result: ExactSpectra) -> Figure:
    """Draw one panel for each match: gaps over the scale of the weights, two lines for each residual."""
    found = result.gaps.differences()
    matches, scales, residuals = (list(dict.fromkeys(column)) for column in zip(*found, strict=True))
    figure, axes = style.subplots(1, len(matches), figsize=(11.5, 4.0), sharey=True, squeeze=False)
    counts = dict(zip(result.gaps.match, result.gaps.num_parameters, strict=True))
    for ax, match in zip(axes[0], matches, strict=True):
        for residual, dash in zip(residuals, ("o:", "o--", "o-"), strict=False):
            rows = [found[match, scale, residual] for scale in scales]
            for kind, (color, name) in enumerate(((PALETTE[1], "attention"), (PALETTE[0], "MLP"))):
                x = np.array(scales) * (1.03 if kind else 0.97)
                middle, low, high = np.array([one[kind] for one in rows]).T
                error, label = [middle - low, high - middle], f"{name}, ρ = {residual:g}"
                ax.errorbar(x, middle, error, fmt=dash, color=color, ms=4, lw=1.2, label=label)
        ax.set(xscale="log", yscale="log")
        ax.set_xticks(scales, [f"{one:g}" for one in scales])
        ax.minorticks_off()
        ax.set(title=f"{match}: {counts[match]} parameters each", xlabel="scale of the weights")
        ax.grid(visible=True)
    style.shared_legend(figure, axes[0][0], loc="outside lower center", ncols=6)
    axes[0][0].set_ylabel("|λ_max(H_o) − λ_max(H)| / λ_max(H)")
    return figure


def _pairing(result: ExactSpectra) -> Figure:
    """Draw P on every rung (left) and the share of exact pairs (right)."""
    table = result.pairings.to_frame()
    figure, axes = style.subplots(1, 2, figsize=(11.5, 0.3 * len(table) + 1.8), sharey=True)
    sides = (
        ((study.ALL, study.OUTLIERS, study.FUNCTIONAL, study.QUERY_KEY), "pairing P"),
        ((study.EXACT, study.EXACT_FUNCTIONAL, study.EXACT_QUERY_KEY), "share of exact pairs"),
    )
    colors = {"H": PALETTE[0], "outliers of H": PALETTE[3], "H_f": PALETTE[1], study.QUERY_KEY: PALETTE[2]}
    height = np.arange(len(table))[::-1]
    for ax, (names, label) in zip(axes, sides, strict=True):
        for i, name in enumerate(names):
            y = height + 0.15 * ((len(names) - 1) / 2 - i)
            short = name.removeprefix("exact pairs of ")
            value, low, high = (table[f"{name}{end}"].to_numpy() for end in ("", ", low", ", high"))
            there, color = np.isfinite(value), colors[short]
            error = style.error_bars(value, low, high)[:, there]
            ax.errorbar(value[there], y[there], xerr=error, fmt="o", ms=4, lw=1.2, color=color, label=short)
        ax.set(xlim=(-0.03, 1.03), xlabel=label)
        ax.set_yticks(height, list(table["rung"]))
        ax.grid(visible=True)
    style.shared_legend(figure, axes[0], loc="outside upper center", ncols=4)
    return figure


SHOWN = (study.NORM_Q, study.ANGLE, study.VALUE, study.LENGTH, study.TARGET, study.OUTLIER, study.BIAS)


def summary(result: ExactSpectra) -> list[Line]:
    """Return the key numbers: label, value, explanation."""
    errors = result.spectra.errors()
    worst = max(errors, key=lambda name: errors[name])
    found: list[Line] = [
        (
            "closed form against dense",
            f"{errors[worst]:.1e}",
            f"largest error of an eigenvalue relative to the largest one, {plural(len(errors), 'case')}; "
            f"worst: {worst}",
        )
    ]
    for varied in SHOWN:
        _, condition = result.sweeps.of(varied).medians("condition")
        words = f"condition number over the values of {varied}, median over seeds"
        found.append((f"{varied} moves κ", f"{condition.min():.3g} to {condition.max():.3g}", words))
    for (match, scale, residual), (one, other, _) in result.gaps.differences().items():
        if scale == residual == 1:
            words = f"relative error of λ_max for attention; MLP with the same number of parameters: {other}"
            found.append((f"GGN for H, {match}", str(one), words))
    for rung in ("1-D attention", "d = d_K = 4"):
        exact = median_interval(result.pairings.of(rung, study.EXACT))
        found.append((f"exact pairs, {rung}", str(exact), "share of eigenvalues that come in pairs ±λ"))
    return [*found, *(("note", "", note) for note in result.notes)]


def captions(result: ExactSpectra) -> dict[str, str]:
    """Return a caption for each figure and table."""
    seeds = plural(len(np.unique(result.sweeps.seed)), "draw")
    draws = plural(len(np.unique(result.gaps.draw)), "draw")
    base = (
        "Fixed values: ‖w_Q‖ = ‖w_K‖ = 2, 60° between them, w_V = 1, 16 normal tokens and targets, squared "
        f"error. Medians over {seeds} of tokens and targets, bands between their quartiles."
    )
    formula = (
        "P = 1 − Σ|p_i − n_i| / Σ(p_i + n_i) for the positive eigenvalues p and the absolute values n "
        "of the negative ones, both descending. P is 1 for a symmetric spectrum, and 0 if all "
        "eigenvalues have one sign."
    )
    return {
        "spectra": "Every eigenvalue in closed form next to that of a dense Hessian in float64, "
        "computed by double backward. The bulk ±b is repeated; outliers are the other eigenvalues.",
        "agreement": "Largest difference between an eigenvalue in closed form and that of the dense "
        "Hessian, relative to the largest |eigenvalue|, for every case.",
        "sweeps": f"Exact spectra of attention on scalars: bulk |b| and the three outliers. {base}",
        "condition": f"Condition number max |λ| / min |λ| over nonzero eigenvalues. {base}",
        "ggn_gap": "Relative error of λ_max of the GGN against the Hessian, for attention and a ReLU MLP "
        f"with the same number of parameters at equal loss; medians over {draws} of weights and data with "
        "95 % bootstrap intervals. Targets are outputs plus ρ times normal numbers. `block` is a head and "
        "a feed-forward layer with skip connections.",
        "pairing": f"{formula} Outliers are the three largest eigenvalues of each sign that are not "
        "repeated. Exact pairs: the share of eigenvalues whose negative is an eigenvalue, too, within "
        "1e-9 of the largest. H_f: the functional Hessian. Each rung drops one assumption. Medians over "
        "draws with bootstrap intervals; the bundled model has one text and no interval. The control: "
        f"{CONTROL_NOTE}.",
    }
