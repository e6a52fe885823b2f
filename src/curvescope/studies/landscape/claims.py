"""What petrov2025, its follow-up and the article around them claim, next to what was measured here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.runs.shown import FAILS, HOLDS, Claim, Origin
from curvescope.studies.landscape import tables

if TYPE_CHECKING:
    from curvescope.studies.landscape.study import Landscape

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
        _three_terms(found),
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


def _three_terms(found: Landscape) -> Claim:
    rows = tables.three_terms(found)
    good = [row for row in rows if row["within error"]]
    reach = max((float(str(row["s"])) for row in good), default=0.0)
    words = (
        f"within {tables.SIGMAS:g} standard errors at {len(good)} of {len(rows)} radii, to s = {reach:.3g}"
    )
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
    rows = tables.theorem7(found)
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
    rows = tables.assumption1(found)
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
    share = float((np.abs(z) <= tables.SIGMAS).mean())
    words = (
        f"{100 * share:.0f} % of {len(z)} k within {tables.SIGMAS:g} standard errors, spread {sub.sigma:.2g}"
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


def _budget(found: Landscape) -> Claim:
    b = found.budget
    ends = zip(b.tolerance, b.k, b.low, b.high, strict=True)
    rows = [f"τ = {tau:g}: {k:.0f} [{low:.0f}, {high:.0f}]" for tau, k, low, high in ends]
    checked = [verdict for verdict in b.verdicts if not verdict.startswith("not")]
    verdict = UNKNOWN if not checked else HOLDS if set(checked) == {"met"} else FAILS
    return Claim(
        "k from the exact law meets a tolerance on held-out data", "met", "; ".join(rows), verdict, *OURS
    )
