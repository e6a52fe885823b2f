"""Tables, claims, figures and captions of the study `landscape`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.closed_form.landscape import gradient_mean_square, increment_bound
from curvescope.core.numbers import plural, with_error
from curvescope.runs.shown import FAILS, HOLDS, Claim, Line, Origin
from curvescope.studies.landscape import analysis
from curvescope.studies.landscape.analysis import Direct, error_of
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.landscape.study import Landscape

SIGMAS = 3.0  # standard errors within which two numbers agree
SHOWN = 12  # rows of the subspace's table


def tables(found: Landscape) -> dict[str, pd.DataFrame]:
    """Every table by name."""
    import pandas as pd

    return {
        "landscape": pd.DataFrame(growth(found)),
        "slopes": pd.DataFrame(slopes(found)),
        "three_terms": pd.DataFrame(three_terms(found)),
        "theorem7": pd.DataFrame(theorem7(found)),
        "assumption1": pd.DataFrame(assumption1(found)),
        "subspace": pd.DataFrame(subspace(found)),
        "budget": pd.DataFrame(budget(found)),
        "claims": pd.DataFrame(found.claims()),
    }


def growth(found: Landscape) -> dict[str, np.ndarray]:
    """Columns of one row per k: root mean squares first, then the published statistic and its smoothing."""
    g = found.growth
    return {
        "k": g.k,
        "model": g.model.rms,
        "control": g.control.rms,
        "law": g.law,
        "model_stderr": g.model.rms_stderr,
        "control_stderr": g.control.rms_stderr,
        "model_mean": g.model.mean,
        "control_mean": g.control.mean,
        "model_mean_stderr": g.model.mean_stderr,
        "control_mean_stderr": g.control.mean_stderr,
        "model_smoothed": g.model.smoothed,
        "control_smoothed": g.control.smoothed,
    }


def slopes(found: Landscape) -> list[dict[str, object]]:
    """Model and control side by side, with 95 % intervals."""
    g = found.growth
    names = {
        "slope": "slope of the mean against k",
        "early": "slope of the smoothed mean, first samples",
        "late": "slope of the smoothed mean, last half",
        "ratio": "k(k+1) mean square / variance",
    }
    rows = []
    for key, what in names.items():
        row: dict[str, object] = {"quantity": what}
        for name, curve in (("model", g.model), ("control", g.control)):
            value, low, high = getattr(curve, key)
            row |= {name: value, f"{name} low": low, f"{name} high": high}
        rows.append({**row, "law": g.law_slope if key == "slope" else 1.0 if key == "ratio" else np.nan})
    return rows


def three_terms(found: Landscape) -> list[dict[str, object]]:
    """One row per radius: the law's terms, their sum, and what direct simulation gave."""
    laws, rows = found.laws, []
    for i, direct in enumerate(found.direct):
        total, error = float(laws.terms[i].sum()), float(laws.total_errors[i])
        row: dict[str, object] = {"s": direct.s, "distance": float(np.sqrt((direct.distance**2).mean()))}
        for j, name in enumerate(("loss", "gradient", "hessian")):
            row |= {name: laws.terms[i, j], f"± {name}": laws.errors[i, j]}
        rows.append(
            {
                **row,
                "law": total,
                "± law": error,
                "direct": direct.mean,
                "± direct": direct.stderr,
                "simulated": float(direct.simulated.mean()),
                "± simulated": direct.simulated_stderr,
                "hessian share": laws.terms[i, 2] / total,
                "z": score(total, error, direct),
                "within error": abs(score(total, error, direct)) <= SIGMAS,
                "rise": float(direct.rise.mean()),
                "± rise": error_of(direct.rise),
            }
        )
    return rows


def score(total: float, error: float, direct: Direct) -> float:
    """(direct − law) in standard errors of the difference; rounding alone counts as none."""
    gap, both = direct.mean - total, float(np.hypot(error, direct.stderr))
    if abs(gap) <= 1e-9 * abs(total):
        return 0.0
    return gap / both if both > 0 else float(np.inf) * np.sign(gap)


def theorem7(found: Landscape) -> list[dict[str, object]]:
    """Bounds of |l_{k+1} − L_k| = (k + 1)|L_{k+1} − L_k| next to the largest that was seen."""
    norms, L = found.curvature.norms, float(found.curvature.losses.max())
    rows = []
    for direct in found.direct:
        r, seen = direct.distance, direct.largest
        printed = increment_bound(L, norms.at_minimum, r, 0)
        rigorous = increment_bound(L, norms.nearby, r, 0)
        rows.append(
            {
                "s": direct.s,
                "distance": float(r.max()),
                "seen": float(seen.max()),
                "printed": float(np.min(printed)),
                "slack printed": float((printed / seen).min()),
                "violations printed": int((seen > printed).sum()),
                "rigorous": float(np.min(rigorous)),
                "slack rigorous": float((rigorous / seen).min()),
                "violations rigorous": int((seen > rigorous).sum()),
                "points": 2 * len(seen) if direct.s > 0 else 1,
            }
        )
    return rows


def assumption1(found: Landscape) -> list[dict[str, object]]:
    """E‖∇L_k(w*)‖² by the law and over subsets."""
    g = found.gradients
    S = len(g.norms)
    rows = []
    for k, squares in zip(g.sizes, g.squares, strict=True):
        expected = float(gradient_mean_square(g.covariance, g.mean_square, int(k), S))
        rows.append(
            {
                "k": int(k),
                "law": expected,
                "measured": float(squares.mean()),
                "± measured": error_of(squares),
                "of all samples": g.mean_square,
                "z": float((squares.mean() - expected) / max(error_of(squares), 1e-300)),
            }
        )
    return rows


def subspace(found: Landscape) -> list[dict[str, object]]:
    """Δ₂ at some k: closed form, simulation, bound."""
    sub = found.subspace
    exact, (mean, stderr), bound = sub.closed_form(), sub.simulated(), sub.bound()
    last = len(exact)
    chosen = np.unique(np.round(np.geomspace(1, last, SHOWN)).astype(int))
    return [
        {
            "k": int(k),
            "closed form": exact[k - 1],
            "direct": mean[k - 1],
            "± direct": stderr[k - 1],
            "z": (mean[k - 1] - exact[k - 1]) / max(stderr[k - 1], 1e-300),
            "bound": bound[k - 1],
            "slack": bound[k - 1] / exact[k - 1],
        }
        for k in chosen
    ]


def budget(found: Landscape) -> dict[str, object]:
    """k for every tolerance, and the check on the held-out half."""
    b = found.budget
    return {
        "tolerance": b.tolerance,
        "k": b.k.astype(int),
        "k low": b.low,
        "k high": b.high,
        "held out": b.held_out,
        "held out low": b.held_low,
        "held out high": b.held_high,
        "verdict": b.verdicts,
    }


# ----------------------------------------------------------------------------------------------------- claims

TAUTOLOGY = "holds for any numbers"
UNBROKEN, UNKNOWN = "not violated here", "not measured"
EXACT = 4.0  # standard errors
PAPER: Origin = ("petrov2025", "paper")
FOLLOW_UP: Origin = ("arXiv 2604.14870", "paper")
OURS: Origin = ("ours", "ours")


def claims(found: Landscape) -> list[Claim]:
    """One row each; every verdict follows from the numbers in it."""
    return [
        _slope(found),
        _plateau(found),
        _exact_law(found),
        _claim_three_terms(found),
        _hessian_share(found),
        *_theorem7(found),
        *_assumption1(found),
        *_criterion(found),
        _budget(found),
    ]


def interval(found: np.ndarray) -> str:
    """`−0.99 [−1.01, −0.98]`."""
    value, low, high = found
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def overlap(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two intervals meet."""
    return bool(a[1] <= b[2] and b[1] <= a[2])


def _slope(found: Landscape) -> Claim:
    g = found.growth
    same = overlap(g.model.slope, g.control.slope)
    near = abs(g.model.slope[0] - g.law_slope) < 0.1
    verdict = (TAUTOLOGY if same else HOLDS) if near else FAILS
    words = f"model {interval(g.model.slope)}, {g.control_name} numbers {interval(g.control.slope)}"
    return Claim("|L_{k+1} − L_k| falls as 1/k because of the landscape", "slope −1", words, verdict, *PAPER)


def _plateau(found: Landscape) -> Claim:
    g = found.growth
    flat = g.model.early[0] > g.model.slope[0] / 2
    verdict = (TAUTOLOGY if overlap(g.model.early, g.control.early) else HOLDS) if flat else FAILS
    words = f"smoothed: model {interval(g.model.early)}, control {interval(g.control.early)}"
    return Claim("it is flat at first, then steep", "a plateau below k ≈ 5,000", words, verdict, *PAPER)


def _exact_law(found: Landscape) -> Claim:
    ratio = found.growth.model.ratio
    inside = abs(ratio[0] - 1) <= EXACT / 1.96 * (ratio[2] - ratio[1]) / 2
    return Claim(
        "E(L_{k+1} − L_k)² = Var/(k(k+1)) at w*",
        "ratio 1",
        interval(ratio),
        HOLDS if inside else FAILS,
        *OURS,
    )


def _claim_three_terms(found: Landscape) -> Claim:
    rows = three_terms(found)
    good = [row for row in rows if row["within error"]]
    reach = max((float(str(row["s"])) for row in good), default=0.0)
    words = f"within {SIGMAS:g} standard errors at {len(good)} of {len(rows)} radii, to s = {reach:.3g}"
    verdict = HOLDS if len(good) == len(rows) else f"{HOLDS} up to s = {reach:.3g}" if reach > 0 else FAILS
    return Claim("around w* the law has three terms", "law = simulation", words, verdict, *OURS)


def _hessian_share(found: Landscape) -> Claim:
    shares = found.laws.terms[:, 2] / found.laws.terms.sum(1)
    words = ", ".join(f"{share:.2g}" for share in shares)
    zero = found.laws.s == 0
    verdict = UNKNOWN if not zero.any() else FAILS if (shares[zero] == 0).all() else HOLDS
    return Claim(
        "the Hessian rules the convergence that was plotted, at w*", "its share is not 0",
        f"share of the Hessian term by radius: {words}", verdict, *PAPER,
    )  # fmt: skip


def _theorem7(found: Landscape) -> list[Claim]:
    rows = theorem7(found)
    claims = []
    for key, name, origin in (
        ("printed", "Theorem 7 as printed, with M = max ‖H_i(w*)‖", PAPER),
        ("rigorous", "Theorem 7′, with the largest ‖H_i‖ found in the ball", OURS),
    ):
        broken = sum(int(str(row[f"violations {key}"])) for row in rows)
        slack = [float(str(row[f"slack {key}"])) for row in rows]
        words = f"{broken} violations; {min(slack):.3g} to {max(slack):.3g} times too large"
        claims.append(Claim(name, "a bound", words, FAILS if broken else UNBROKEN, *origin))
    return claims


def _assumption1(found: Landscape) -> list[Claim]:
    rows = assumption1(found)
    worst = max(abs(float(str(row["z"]))) for row in rows)
    first = rows[0]
    size = f"E‖∇L_k(w*)‖² = {first['measured']:.3g} ± {first['± measured']:.2g} at k = {first['k']}"
    zero = found.gradients.covariance <= 1e-12 * max(found.gradients.mean_square, 1e-300)
    return [
        Claim("Assumption 1: ∇L_k(w*) = 0 for all k", "0", size, HOLDS if zero else FAILS, *PAPER),
        Claim(
            "E‖∇L_k‖² = ‖ḡ‖² + tr Cov/k · (N − k)/(N − 1)", "law = subsets",
            f"largest difference {worst:.2g} standard errors over {len(rows)} sizes",
            HOLDS if worst <= EXACT else FAILS, *OURS,
        ),
    ]  # fmt: skip


def _criterion(found: Landscape) -> list[Claim]:
    sub = found.subspace
    exact, (mean, stderr), bound = sub.closed_form(), sub.simulated(), sub.bound()
    z = (mean - exact) / np.maximum(stderr, 1e-300)
    share = float((np.abs(z) <= SIGMAS).mean())
    words = f"{100 * share:.0f} % of {len(z)} k within {SIGMAS:g} standard errors, spread {sub.sigma:.2g}"
    slack = bound / exact
    return [
        Claim(
            "the closed form of Δ₂ in the eigen-subspace", "closed form = Monte Carlo", words,
            HOLDS if share >= 0.9 else FAILS, *FOLLOW_UP,
        ),
        Claim(
            "Δ₂ ≤ (12M_l² + 3s²M_g² + 3s⁴(D² + 2D)M_H²)/(k+1)²", "a bound",
            f"{slack.min():.3g} to {slack.max():.3g} times too large",
            FAILS if (slack < 1).any() else UNBROKEN, *FOLLOW_UP,
        ),
    ]  # fmt: skip


def _budget(found: Landscape) -> Claim:
    b = found.budget
    ends = zip(b.tolerance, b.k, b.low, b.high, strict=True)
    rows = [f"τ = {tau:g}: {k:.0f} [{low:.0f}, {high:.0f}]" for tau, k, low, high in ends]
    checked = [verdict for verdict in b.verdicts if not verdict.startswith("not")]
    verdict = UNKNOWN if not checked else HOLDS if set(checked) == {"met"} else FAILS
    return Claim(
        "k from the exact law meets a tolerance on held-out data", "met", "; ".join(rows), verdict, *OURS
    )


# ---------------------------------------------------------------------------------------------------- figures

BLUE, RED, GREEN, VIOLET = PALETTE[:4]


def figures(found: Landscape) -> dict[str, Figure]:
    """Every figure by name."""
    return {
        "landscape": _growth(found),
        "three_terms": _figure_three_terms(found),
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


def _figure_three_terms(found: Landscape) -> Figure:
    """The terms by radius; their sum and the simulation; the difference in standard errors."""
    figure, (left, middle, right) = _panels(3, width=13.0)
    order = np.argsort(found.laws.s)
    rows = [three_terms(found)[i] for i in order]
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
    middle.set_title("k(k+1) E(L$_{k+1}$ − L$_k$)²")
    middle.legend()
    right.axhspan(-SIGMAS, SIGMAS, color="0.9")
    right.axhline(0, color="0.5", lw=0.8)
    right.plot(x, z, "o-", color=RED, lw=0.8)
    right.set_title("(simulation − law) / standard error")
    for ax in (middle, right):
        ax.set_xticks(x, labels)
        ax.set_xlabel("radius s")
    return figure


def _bounds(found: Landscape) -> Figure:
    """Left: what was seen next to both bounds. Right: Assumption 1."""
    figure, (left, right) = _panels(2)
    rows = theorem7(found)
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
    left.set_title("(k+1)|L$_{k+1}$ − L$_k$| and its bounds")
    left.legend()
    table = assumption1(found)
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
    ax.set_title(title)
    ax.legend()


def _ticks(ax: Axes, places: np.ndarray) -> None:
    """Ticks at these places alone."""
    ax.set_xticks(places, [f"{place:.2g}" for place in places], fontsize=9)
    ax.set_xticks([], minor=True)


# --------------------------------------------------------------------------------------------------- captions


def summary(found: Landscape) -> list[Line]:
    """Sizes, slopes side by side, and every claim with its verdict."""
    g, H = found.growth, found.curvature.hessians
    traces = H.traces_of(np.arange(H.traces.shape[1]))
    by_probe = H.traces.mean(0)
    error = 0.0 if H.exact else error_of(by_probe)
    return [
        ("samples", f"{len(g.k) + 1:,}", f"sequences of {found.data}, {found.loss_name}, {found.model}"),
        ("slope, model", interval(g.model.slope), "of mean |L_{k+1} − L_k| against k, with a 95 % interval"),
        ("slope, control", interval(g.control.slope), f"the same of independent {g.control_name} numbers"),
        ("tr H_x", with_error(float(traces.mean()), error), f"mean of {plural(len(traces), 'sample')}"),
        ("tr Cov g", f"{found.gradients.unbiased:.4g}", f"‖ḡ‖² = {found.gradients.mean_square:.3g}"),
        *((c.claim, c.verdict, f"{c.measured} ({c.source})") for c in claims(found)),
        *(("note", "", note) for note in found.notes),
    ]


def captions(found: Landscape) -> dict[str, str]:
    """What each figure and table shows."""
    g, H, sub = found.growth, found.curvature.hessians, found.subspace
    S, J = len(found.curvature.losses), max(len(d.variance) for d in found.direct)
    how = "exact" if H.exact else f"from {plural(H.traces.shape[1], 'probe')} that all samples share"
    return {
        "landscape": "The mean loss L_k of k samples settles: the root of the mean of (L_{k+1} − L_k)² over "
        f"{g.num_orders} random orders (model), of independent {g.control_name} numbers with the same mean "
        "and variance (control), and the exact law √(Var/(k(k+1))). The columns _mean are mean absolute "
        f"values, _smoothed their exponential moving average ({analysis.EMA}), as published; ± is a standard "
        "error over orders, a band two of them. Nothing here knows the Hessian.",
        "claims": "What is said of the landscape as data grow, next to what was measured here; every verdict "
        "follows from the numbers beside it.",
        "slopes": "Model and control side by side; 95 % intervals by resampling the orders. The law's slope "
        f"is fitted at the same k, from {analysis.FIRST} on.",
        "three_terms": f"k(k+1) E(L_{{k+1}} − L_k)² around w*, δ ~ N(0, s² I), of {S} samples: the variance "
        f"of the loss with ½s² tr H_x, the covariance of gradients, the fluctuation of Hessians ({how}; "
        "errors by leaving out one probe at a time), against the variance of losses at "
        f"{J} pairs of points w* ± δ (direct) and increments along random orders there (simulated). z is "
        "direct − law in standard errors, the band three of them; beyond it the quadratic model has ended, "
        "not the law for a fixed point. rise is the mean loss above that at w*.",
        "theorem7": "The largest (k+1)|L_{k+1} − L_k| that was seen next to 2L + M r²: with M at w* "
        "(printed) and with the largest M found in the ball that the rigorous version asks for. Spectral "
        f"norms are from power iteration on the {len(found.curvature.norms.samples)} samples with the "
        "largest Frobenius norm, at w* and at random points: values from below, so that this measures slack "
        "and proves nothing. Right: the gradients of Assumption 1.",
        "assumption1": "Mean squared gradient of k samples without replacement, by the law and over "
        f"{found.gradients.squares.shape[1]} subsets; of all samples together it is ‖ḡ‖², since w* is where "
        "training stopped.",
        "subspace": f"Δ₂ on the span of {plural(len(sub.eigenvalues), 'eigenvector')} of the mean Hessian, "
        f"eigenvalues {', '.join(f'{v:.3g}' for v in sub.eigenvalues)} (residuals "
        f"{', '.join(f'{v:.2g}' for v in sub.residuals)}), points of spread {sub.sigma:.2g}: closed form, "
        f"simulation with the losses themselves at {len(sub.direct)} pairs of them, and the published bound. "
        "Right: the budget, whose table says more.",
        "budget": "The least k for a tolerance of |L_{k+1} − L_k|, from "
        f"{found.budget.num_pilot} samples with a 95 % interval, and the root of the mean square at that k "
        f"on {found.budget.num_held_out} held-out samples.",
    }
