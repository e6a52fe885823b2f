"""The figures of the study `landscape`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.studies.landscape import tables
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.landscape.study import Landscape

BLUE, RED, GREEN, VIOLET = PALETTE[:4]


def draw(found: Landscape) -> dict[str, Figure]:
    """Every figure by name."""
    return {
        "landscape": _growth(found),
        "three_terms": _three_terms(found),
        "theorem7": _bounds(found),
        "subspace": _subspace(found),
    }


def _panels(count: int, *, width: float = 10.0) -> tuple[Figure, np.ndarray]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(width, 3.8), layout="constrained")
    return figure, axes


def _growth(found: Landscape) -> Figure:
    """Left: root mean squares and the law. Right: the published statistic, raw and smoothed."""
    figure, (left, right) = _panels(2)
    g = found.growth
    for curve, name, color in ((g.model, "model", BLUE), (g.control, f"control: {g.control_name}", RED)):
        left.plot(g.k, curve.rms, color=color, lw=0.9, label=name)
        low, high = curve.rms - 2 * curve.rms_stderr, curve.rms + 2 * curve.rms_stderr
        left.fill_between(g.k, np.maximum(low, 1e-12), high, color=color, alpha=0.2, lw=0)
        right.plot(g.k, curve.mean, color=color, lw=0.5, alpha=0.45)
        style = {"lw": 3.2, "alpha": 0.5} if curve is g.model else {"lw": 1.2}  # one lies on the other
        right.plot(g.k, curve.smoothed, color=color, label=f"{name}, smoothed", **style)
    left.plot(g.k, g.law, color="0.1", lw=1, ls="--", label="law √(Var/k(k+1))")
    right.plot(g.k, g.deviation / g.k, color="0.1", lw=1, ls="--", label="mean |l − mean| / k")
    titles = "root mean square |L$_{k+1}$ − L$_k$|", "mean |L$_{k+1}$ − L$_k$|, and smoothed as published"
    for ax, title in zip((left, right), titles, strict=True):
        _log_log(ax, "samples k", title)
    return figure


def _three_terms(found: Landscape) -> Figure:
    """The terms by radius; their sum and the simulation; the difference in standard errors."""
    figure, (left, middle, right) = _panels(3, width=13.0)
    order = np.argsort(found.laws.s)
    rows = [tables.three_terms(found)[i] for i in order]
    s, terms, errors = (x[order] for x in (found.laws.s, found.laws.terms, found.laws.errors))
    for j, (name, color) in enumerate((("loss", BLUE), ("gradient", GREEN), ("Hessian", VIOLET))):
        shown = (terms[:, j] > 0) & (s > 0)
        spread = 2 * errors[shown, j]
        left.errorbar(s[shown], terms[shown, j], spread, color=color, marker=".", lw=1, label=f"{name} term")
    _log_log(left, "radius s", "terms of k(k+1) E(L$_{k+1}$ − L$_k$)²")
    _ticks(left, s[s > 0])
    x, labels = np.arange(len(s)), [f"{value:.2g}" for value in s]
    law, error, drawn, spread, z = (
        np.array([row[name] for row in rows], dtype=float)
        for name in ("law", "± law", "direct", "± direct", "z")
    )
    middle.errorbar(
        x, law, 2 * error, color="0.1", ls="--", lw=1, capsize=3, label="law, ± 2 standard errors"
    )
    middle.errorbar(x + 0.08, drawn, 2 * spread, color=RED, fmt="o", ms=4, label="simulation")
    middle.set_title("k(k+1) E(L$_{k+1}$ − L$_k$)²", fontsize=10)
    middle.legend(fontsize=8)
    right.axhspan(-tables.SIGMAS, tables.SIGMAS, color="0.9")
    right.axhline(0, color="0.5", lw=0.8)
    right.plot(x, z, "o-", color=RED, lw=0.8)
    right.set_title("(simulation − law) / standard error", fontsize=10)
    for ax in (middle, right):
        ax.set_xticks(x, labels)
        ax.set_xlabel("radius s")
    return figure


def _bounds(found: Landscape) -> Figure:
    """Left: what was seen next to both bounds. Right: Assumption 1."""
    figure, (left, right) = _panels(2)
    rows = tables.theorem7(found)
    x = np.arange(len(rows))
    for key, name, style in (
        ("seen", "largest seen", {"color": RED, "marker": "o", "ms": 4}),
        ("printed", "Theorem 7 as printed", {"color": BLUE, "marker": "o", "ms": 4}),
        ("rigorous", "Theorem 7′", {"color": GREEN, "marker": "o", "ms": 9, "mfc": "none", "ls": ":"}),
    ):
        left.plot(x, [row[key] for row in rows], lw=1, label=name, **style)
    left.set_yscale("log")
    left.set_xticks(x, [f"{row['distance']:.2g}" for row in rows])
    left.set_xlabel("distance ‖w − w*‖")
    left.set_title("(k+1)|L$_{k+1}$ − L$_k$| and its bounds", fontsize=10)
    left.legend(fontsize=8)
    table = tables.assumption1(found)
    k = [row["k"] for row in table]
    right.plot(k, [row["law"] for row in table], "--", color="0.1", lw=1, label="law")
    right.errorbar(
        k, [row["measured"] for row in table], [2 * float(str(row["± measured"])) for row in table],
        fmt="o", color=BLUE, ms=4, label="random subsets",
    )  # fmt: skip
    right.axhline(found.gradients.mean_square, color="0.6", lw=0.8, label="all samples")
    _log_log(right, "samples k", "E‖∇L$_k$(w*)‖²")
    _ticks(right, found.gradients.sizes)
    return figure


def _subspace(found: Landscape) -> Figure:
    """Left: Δ₂. Right: the budget."""
    figure, (left, right) = _panels(2)
    sub = found.subspace
    exact, (mean, stderr), bound = sub.closed_form(), sub.simulated(), sub.bound()
    k = np.arange(1, len(exact) + 1)
    left.plot(k, bound, color=GREEN, lw=1, label="published bound")
    left.plot(k, exact, color="0.1", lw=1, label="closed form")
    left.errorbar(k, mean, 2 * stderr, fmt=".", color=RED, ms=3, lw=0.6, label="simulation")
    _log_log(left, "samples k", f"Δ₂ on {len(sub.eigenvalues)} eigenvectors")
    b = found.budget
    right.fill_between(b.tolerance, b.low, b.high, color=BLUE, alpha=0.2, lw=0)
    right.plot(b.tolerance, b.k, "o-", color=BLUE, ms=4, lw=1, label="k from one half, 95 %")
    ends = np.clip(np.stack([b.held_out - b.held_low, b.held_high - b.held_out]), 0, None)
    right.errorbar(b.held_out, b.k, xerr=ends, fmt="s", color=RED, ms=4, label="held-out half at that k")
    _log_log(right, "tolerance of |L$_{k+1}$ − L$_k$|", "samples needed")
    _ticks(right, b.tolerance)
    right.set_yticks(b.k, [f"{k:.0f}" for k in b.k])
    right.set_yticks([], minor=True)
    return figure


def _log_log(ax: Axes, label: str, title: str) -> None:
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel(label)
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=8)


def _ticks(ax: Axes, places: np.ndarray) -> None:
    """Ticks at these places alone."""
    ax.set_xticks(places, [f"{place:.2g}" for place in places], fontsize=9)
    ax.set_xticks([], minor=True)
