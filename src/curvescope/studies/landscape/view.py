"""Tables, claims, figures and captions of the study `landscape`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.closed_form.landscape import gradient_mean_square, increment_bound
from curvescope.core.number_format import plural, with_error
from curvescope.runs.study_result import FAILS, HOLDS, Claim, Line, Origin, Tables
from curvescope.studies.common.statistics import OURS
from curvescope.studies.landscape import analysis
from curvescope.studies.landscape.analysis import PairedLosses, error_of
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.landscape.analysis import IncrementGrowth
    from curvescope.studies.landscape.study import Landscape

SIGMAS = 3.0  # standard errors within which two numbers agree
SHOWN = 12  # most rows of the subspace table


def tables(result: Landscape) -> Tables:
    """Return every table by name."""
    return {
        "landscape": growth(result),
        "slopes": slopes(result),
        "three_terms": three_terms(result),
        "theorem7": theorem7(result),
        "assumption1": assumption1(result),
        "subspace": subspace(result),
        "budget": budget(result),
        "claims": result.claims(),
    }


def growth(result: Landscape) -> dict[str, np.ndarray]:
    """One row per k: root mean squares first, then the published statistic and its smoothed form."""
    g = result.growth
    columns = {"k": g.k, "model": g.model.rms, "control": g.control.rms, "law": g.law}
    names = {"stderr": "rms_stderr", "mean": "mean", "mean_stderr": "mean_stderr", "smoothed": "smoothed"}
    return columns | {
        f"{side}_{name}": getattr(getattr(g, side), attribute)
        for name, attribute in names.items()
        for side in ("model", "control")
    }


def slopes(result: Landscape) -> list[dict[str, object]]:
    """Slopes of the model and of the control, with 95 % intervals."""
    g = result.growth
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


def three_terms(result: Landscape) -> list[dict[str, object]]:
    """One row per radius: the law's terms, their sum, and the values from direct simulation."""
    laws, rows = result.laws, []
    for i, direct in enumerate(result.direct):
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


def score(total: float, error: float, direct: PairedLosses) -> float:
    """(direct − law) in standard errors of the difference. A difference at rounding level counts as zero."""
    gap, both = direct.mean - total, float(np.hypot(error, direct.stderr))
    if abs(gap) <= 1e-9 * abs(total):
        return 0.0
    return gap / both if both > 0 else float(np.inf) * np.sign(gap)


def theorem7(result: Landscape) -> list[dict[str, object]]:
    """Bounds of |l_{k+1} − L_k| = (k + 1)|L_{k+1} − L_k| next to the largest measured value."""
    norms, L = result.curvature.norms, float(result.curvature.losses.max())
    rows = []
    for direct in result.direct:
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


def assumption1(result: Landscape) -> list[dict[str, object]]:
    """E‖∇L_k(w*)‖² from the law and measured on random subsets."""
    g = result.gradients
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


def subspace(result: Landscape) -> list[dict[str, object]]:
    """Δ₂ at some k: closed form, simulation and bound."""
    sub = result.subspace
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


def budget(result: Landscape) -> dict[str, object]:
    """Number of samples for every tolerance, and the check on the held-out half."""
    b = result.budget
    return {
        "tolerance": b.tolerance, "k": b.k.astype(int), "k low": b.low, "k high": b.high,
        "held out": b.held_out, "held out low": b.held_low, "held out high": b.held_high,
        "verdict": b.verdicts,
    }  # fmt: skip


TAUTOLOGY = "holds for any numbers"
UNBROKEN, UNKNOWN = "not violated here", "not measured"
EXACT = 4.0  # standard errors
PAPER: Origin = ("petrov2025", "paper")
FOLLOW_UP: Origin = ("arXiv 2604.14870", "paper")


def claims(result: Landscape) -> list[Claim]:
    """One row per claim. Every verdict follows from the numbers in its row."""
    return [
        _slope(result),
        _plateau(result),
        _exact_law(result),
        _claim_three_terms(result),
        _hessian_share(result),
        *_theorem7(result),
        *_assumption1(result),
        *_criterion(result),
        _budget(result),
    ]


def interval(estimate: np.ndarray) -> str:
    """Format an estimate with its interval, such as `−0.99 [−1.01, −0.98]`."""
    value, low, high = estimate
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def overlap(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if two intervals overlap."""
    return bool(a[1] <= b[2] and b[1] <= a[2])


def slope_verdict(g: IncrementGrowth) -> str:
    """Verdict on a slope of −1: a tautology if independent numbers have the same slope."""
    same = overlap(g.model.slope, g.control.slope)
    return FAILS if abs(g.model.slope[0] - g.law_slope) >= 0.1 else TAUTOLOGY if same else HOLDS


def plateau_verdict(g: IncrementGrowth) -> str:
    """Verdict on a flat beginning: a tautology if independent numbers begin with the same slope."""
    same = overlap(g.model.early, g.control.early)
    return FAILS if g.model.early[0] <= g.model.slope[0] / 2 else TAUTOLOGY if same else HOLDS


def _slope(result: Landscape) -> Claim:
    g = result.growth
    words = f"model {interval(g.model.slope)}, {g.control_name} numbers {interval(g.control.slope)}"
    claim = "|L_{k+1} − L_k| falls as 1/k because of the landscape"
    return Claim(claim, "slope −1", words, slope_verdict(g), *PAPER)


def _plateau(result: Landscape) -> Claim:
    g = result.growth
    words = f"smoothed: model {interval(g.model.early)}, control {interval(g.control.early)}"
    claim = "the increments first stay flat, then fall steeply"
    return Claim(claim, "a plateau below k ≈ 5,000", words, plateau_verdict(g), *PAPER)


def _exact_law(result: Landscape) -> Claim:
    ratio = result.growth.model.ratio
    inside = abs(ratio[0] - 1) <= EXACT / 1.96 * (ratio[2] - ratio[1]) / 2
    claim, verdict = "E(L_{k+1} − L_k)² = Var/(k(k+1)) at w*", HOLDS if inside else FAILS
    return Claim(claim, "ratio 1", interval(ratio), verdict, *OURS)


def _claim_three_terms(result: Landscape) -> Claim:
    rows = three_terms(result)
    good = [row for row in rows if row["within error"]]
    reach = max((float(str(row["s"])) for row in good), default=0.0)
    words = f"within {SIGMAS:g} standard errors at {len(good)} of {len(rows)} radii, to s = {reach:.3g}"
    verdict = HOLDS if len(good) == len(rows) else f"{HOLDS} up to s = {reach:.3g}" if reach > 0 else FAILS
    return Claim("around w* the law has three terms", "law = simulation", words, verdict, *OURS)


def _hessian_share(result: Landscape) -> Claim:
    shares = result.laws.terms[:, 2] / result.laws.terms.sum(1)
    words = ", ".join(f"{share:.2g}" for share in shares)
    zero = result.laws.s == 0
    verdict = UNKNOWN if not zero.any() else FAILS if (shares[zero] == 0).all() else HOLDS
    return Claim(
        "the Hessian determines the plotted convergence at w*", "share above 0",
        f"Hessian term as a share of the law, by radius: {words}", verdict, *PAPER,
    )  # fmt: skip


def _theorem7(result: Landscape) -> list[Claim]:
    rows = theorem7(result)
    claims = []
    for key, name, origin in (
        ("printed", "Theorem 7 as printed, with M = max ‖H_i(w*)‖", PAPER),
        ("rigorous", "Theorem 7′, with the largest ‖H_i‖ measured in the ball", OURS),
    ):
        broken = sum(int(str(row[f"violations {key}"])) for row in rows)
        slack = [float(str(row[f"slack {key}"])) for row in rows]
        words = f"{broken} violations; {min(slack):.3g} to {max(slack):.3g} times too large"
        claims.append(Claim(name, "a bound", words, FAILS if broken else UNBROKEN, *origin))
    return claims


def _assumption1(result: Landscape) -> list[Claim]:
    rows = assumption1(result)
    worst = max(abs(float(str(row["z"]))) for row in rows)
    first = rows[0]
    size = f"E‖∇L_k(w*)‖² = {first['measured']:.3g} ± {first['± measured']:.2g} at k = {first['k']}"
    zero = result.gradients.covariance <= 1e-12 * max(result.gradients.mean_square, 1e-300)
    return [
        Claim("Assumption 1: ∇L_k(w*) = 0 for all k", "0", size, HOLDS if zero else FAILS, *PAPER),
        Claim(
            "E‖∇L_k‖² = ‖ḡ‖² + tr Cov/k · (N − k)/(N − 1)", "law = subsets",
            f"largest difference {worst:.2g} standard errors over {len(rows)} subset sizes",
            HOLDS if worst <= EXACT else FAILS, *OURS,
        ),
    ]  # fmt: skip


def _criterion(result: Landscape) -> list[Claim]:
    sub = result.subspace
    exact, (mean, stderr), bound = sub.closed_form(), sub.simulated(), sub.bound()
    z = (mean - exact) / np.maximum(stderr, 1e-300)
    share = float((np.abs(z) <= SIGMAS).mean())
    words = (
        f"closed form within {SIGMAS:g} standard errors at {100 * share:.0f} % of {len(z)} values of k; "
        f"σ = {sub.sigma:.2g}"
    )
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


def _budget(result: Landscape) -> Claim:
    b = result.budget
    ends = zip(b.tolerance, b.k, b.low, b.high, strict=True)
    rows = [f"τ = {tau:g}: {k:.0f} [{low:.0f}, {high:.0f}]" for tau, k, low, high in ends]
    checked = [verdict for verdict in b.verdicts if not verdict.startswith("not")]
    verdict = UNKNOWN if not checked else HOLDS if set(checked) == {"met"} else FAILS
    claim = "the sample size k from the exact law meets its tolerance on held-out data"
    return Claim(claim, "met", "; ".join(rows), verdict, *OURS)


BLUE, RED, GREEN, VIOLET = PALETTE[:4]


def figures(result: Landscape) -> dict[str, Figure]:
    """Return every figure by name."""
    return {
        "landscape": _growth(result),
        "three_terms": _figure_three_terms(result),
        "theorem7": _bounds(result),
        "subspace": _subspace(result),
    }


def _growth(result: Landscape) -> Figure:
    """Left: root mean squares and the law. Right: the published statistic, raw and smoothed."""
    figure, (left, right) = style.subplots(1, 2, figsize=(10, 3.8))
    g = result.growth
    for curve, name, color in ((g.model, "model", BLUE), (g.control, f"control: {g.control_name}", RED)):
        left.plot(g.k, curve.rms, color=color, lw=0.9, label=name)
        low, high = curve.rms - 2 * curve.rms_stderr, curve.rms + 2 * curve.rms_stderr
        left.fill_between(g.k, np.maximum(low, 1e-12), high, color=color, alpha=0.2, lw=0)
        right.plot(g.k, curve.mean, color=color, lw=0.5, alpha=0.45)
        # The two curves nearly coincide, so the model's is drawn wider.
        look = {"lw": 3.2, "alpha": 0.5} if curve is g.model else {"lw": 1.2}
        right.plot(g.k, curve.smoothed, color=color, label=f"{name}, smoothed", **look)
    left.plot(g.k, g.law, color="0.1", lw=1, ls="--", label="law √(Var/k(k+1))")
    right.plot(g.k, g.deviation / g.k, color="0.1", lw=1, ls="--", label="mean |l − mean| / k")
    titles = "root mean square |L$_{k+1}$ − L$_k$|", "mean |L$_{k+1}$ − L$_k$|, raw and smoothed"
    for ax, title in zip((left, right), titles, strict=True):
        _log_log(ax, "samples k", title)
    return figure


def _figure_three_terms(result: Landscape) -> Figure:
    figure, (left, middle, right) = style.subplots(1, 3, figsize=(13, 3.8))
    order = np.argsort(result.laws.s)
    rows = [three_terms(result)[i] for i in order]
    s, terms, errors = (x[order] for x in (result.laws.s, result.laws.terms, result.laws.errors))
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


def _bounds(result: Landscape) -> Figure:
    """Left: the largest measured increment next to both bounds. Right: Assumption 1."""
    figure, (left, right) = style.subplots(1, 2, figsize=(10, 3.8))
    rows = theorem7(result)
    x = np.arange(len(rows))
    for key, name, look in (
        ("seen", "largest measured", {"color": RED, "marker": "o", "ms": 4}),
        ("printed", "Theorem 7 as printed", {"color": BLUE, "marker": "o", "ms": 4}),
        ("rigorous", "Theorem 7′", {"color": GREEN, "marker": "o", "ms": 9, "mfc": "none", "ls": ":"}),
    ):
        left.plot(x, [row[key] for row in rows], lw=1, label=name, **look)
    left.set_yscale("log")
    left.set_xticks(x, [f"{row['distance']:.2g}" for row in rows])
    left.set(xlabel="distance ‖w − w*‖", title="(k+1)|L$_{k+1}$ − L$_k$| and its bounds")
    left.legend()
    table = assumption1(result)
    k = [row["k"] for row in table]
    right.plot(k, [row["law"] for row in table], "--", color="0.1", lw=1, label="law")
    right.errorbar(
        k, [row["measured"] for row in table], [2 * float(str(row["± measured"])) for row in table],
        fmt="o", color=BLUE, ms=4, label="random subsets",
    )  # fmt: skip
    right.axhline(result.gradients.mean_square, color="0.6", lw=0.8, label="all samples")
    _log_log(right, "samples k", "E‖∇L$_k$(w*)‖²")
    _ticks(right, result.gradients.sizes)
    return figure


def _subspace(result: Landscape) -> Figure:
    """Left: Δ₂ in the subspace. Right: sample size for a tolerance."""
    figure, (left, right) = style.subplots(1, 2, figsize=(10, 3.8))
    sub = result.subspace
    exact, (mean, stderr), bound = sub.closed_form(), sub.simulated(), sub.bound()
    k = np.arange(1, len(exact) + 1)
    left.plot(k, bound, color=GREEN, lw=1, label="published bound")
    left.plot(k, exact, color="0.1", lw=1, label="closed form")
    left.errorbar(k, mean, 2 * stderr, fmt=".", color=RED, ms=3, lw=0.6, label="simulation")
    _log_log(left, "samples k", f"Δ₂ on {len(sub.eigenvalues)} eigenvectors")
    b = result.budget
    right.fill_between(b.tolerance, b.low, b.high, color=BLUE, alpha=0.2, lw=0)
    right.plot(b.tolerance, b.k, "o-", color=BLUE, ms=4, lw=1, label="k from one half, 95 %")
    ends = np.clip(np.stack([b.held_out - b.held_low, b.held_high - b.held_out]), 0, None)
    right.errorbar(b.held_out, b.k, xerr=ends, fmt="s", color=RED, ms=4, label="held-out half at this k")
    _log_log(right, "tolerance of |L$_{k+1}$ − L$_k$|", "samples needed")
    _ticks(right, b.tolerance)
    right.set_yticks(b.k, [f"{k:.0f}" for k in b.k])
    right.set_yticks([], minor=True)
    return figure


def _log_log(ax: Axes, label: str, title: str) -> None:
    ax.set(xscale="log", yscale="log", xlabel=label, title=title)
    ax.legend()


def _ticks(ax: Axes, places: np.ndarray) -> None:
    """Draw ticks only at `places`."""
    ax.set_xticks(places, [f"{place:.2g}" for place in places])
    ax.set_xticks([], minor=True)


def summary(result: Landscape) -> list[Line]:
    """Sizes, slopes of model and control, and every claim with its verdict."""
    g, H = result.growth, result.curvature.hessians
    traces = H.traces_of(np.arange(H.traces.shape[1]))
    by_probe = H.traces.mean(0)
    error = 0.0 if H.exact else error_of(by_probe)
    return [
        ("samples", f"{len(g.k) + 1:,}", f"sequences of {result.data}, {result.loss_name}, {result.model}"),
        (
            "slope, model",
            interval(g.model.slope),
            "slope of mean |L_{k+1} − L_k| against k, with a 95 % interval",
        ),
        (
            "slope, control",
            interval(g.control.slope),
            f"the same slope for independent {g.control_name} numbers",
        ),
        ("tr H_x", with_error(float(traces.mean()), error), f"mean of {plural(len(traces), 'sample')}"),
        ("tr Cov g", f"{result.gradients.unbiased:.4g}", f"‖ḡ‖² = {result.gradients.mean_square:.3g}"),
        *((c.claim, c.verdict, f"{c.measured} ({c.source})") for c in claims(result)),
        *(("note", "", note) for note in result.notes),
    ]


def captions(result: Landscape) -> dict[str, str]:
    """Return the caption of each figure and table."""
    g, H, sub = result.growth, result.curvature.hessians, result.subspace
    S, J = len(result.curvature.losses), max(len(d.variance) for d in result.direct)
    how = "exact" if H.exact else f"estimated with {plural(H.traces.shape[1], 'probe')} shared by all samples"
    return {
        "landscape": "Change of the mean loss L_k when one sample is added. Shown is the root mean square "
        f"of L_{{k+1}} − L_k: over {g.num_orders} random orders of the samples (model), for independent "
        f"{g.control_name} numbers with the same mean and variance (control), and by the exact law "
        "√(Var/(k(k+1))). Columns ending in _mean are mean absolute values; columns ending in _smoothed "
        f"are their exponential moving average ({analysis.EMA}), as published. ± is one standard error "
        "over orders; bands show two. None of these curves uses the Hessian.",
        "claims": "Claims about the landscape as data grows, next to the values measured here. Every "
        "verdict follows from the numbers in its row.",
        "slopes": "Slopes of the model and of the control, with 95 % intervals from resampled orders. The "
        f"slope of the law is fitted over the same k, from {analysis.FIRST} on.",
        "three_terms": f"k(k+1) E(L_{{k+1}} − L_k)² around w* for {S} samples, with δ ~ N(0, s² I). The law "
        "has three terms: the variance of loss + ½s² tr H_x, the covariance of the gradients, and the "
        f"fluctuation of the Hessians ({how}; errors leave out one probe at a time). It is compared with "
        f"the variance of the losses at {J} pairs of points w* ± δ (direct) and with increments along "
        "random orders at these points (simulated). z is direct − law in standard errors; the band "
        "shows three. Outside the band the quadratic model of the loss no longer holds. rise is the "
        "mean loss minus its value at w*.",
        "theorem7": "Largest measured (k+1)|L_{k+1} − L_k| next to the bound 2L + M r²: with M at w* "
        "(printed), and with the largest M measured in the ball that the rigorous version requires "
        "(rigorous). Spectral norms come from power iteration on the "
        f"{len(result.curvature.norms.samples)} samples with the largest Frobenius norms, at w* and at "
        "random points. They are lower bounds, so the table measures slack and proves nothing. Right: "
        "the gradients of Assumption 1.",
        "assumption1": "Mean squared gradient of k samples drawn without replacement: from the law, and "
        f"over {result.gradients.squares.shape[1]} random subsets. For all samples it equals ‖ḡ‖², which "
        "is not zero because training stopped before a minimum.",
        "subspace": f"Δ₂ in the span of {plural(len(sub.eigenvalues), 'eigenvector')} of the mean Hessian "
        f"with eigenvalues {', '.join(f'{v:.3g}' for v in sub.eigenvalues)} (residuals "
        f"{', '.join(f'{v:.2g}' for v in sub.residuals)}), for points of standard deviation "
        f"{sub.sigma:.2g}: closed form, simulation from the losses at {len(sub.direct)} pairs of points, "
        "and the published bound. Right: the sample size for a tolerance; the table of the budget has "
        "more.",
        "budget": f"Smallest k for a tolerance of |L_{{k+1}} − L_k|, from {result.budget.num_pilot} "
        "samples with a 95 % interval, and the root mean square at this k on "
        f"{result.budget.num_held_out} held-out samples.",
    }
