"""What is said about curvature and size, each next to what the grid says; every verdict is computed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from curvescope.algorithms.estimates.intervals import student
from curvescope.runs.shown import FAILS, HOLDS, OPEN, Claim, Origin

if TYPE_CHECKING:
    from curvescope.studies.scaling.laws import Law
    from curvescope.studies.scaling.study import Scaling

PARTLY = "in part"  # on the whole, but not between the first or the last two sizes
ARTICLE: Origin = ("article", "article")
PRECURSOR: Origin = ("arXiv 2409.11995", "paper")
OURS: Origin = ("exact law", "ours")
NEAR = 2.0  # a factor that two numbers may differ by and still be called the same
SMALL = 0.1  # of ‖H‖_F: what may be left out without a word


def judge(result: Scaling) -> list[Claim]:
    """All claims."""
    grows = "the Hessian's norm grows with model size"
    return [
        _exponent(result, "lambda_max", "D", -0.5, "the Hessian scales as 1/√D: λ_max"),
        _exponent(result, "frobenius", "D", -0.5, "the Hessian scales as 1/√D: ‖H‖_F"),
        _sign(result, "spread", "D", -1, "larger datasets give better-conditioned Hessians"),
        _sign(result, "lambda_max", "N", 1, f"{grows}: λ_max"),
        _sign(result, "frobenius", "N", 1, f"{grows}: ‖H‖_F"),
        _one_curve(result),
        _gradient(result),
        _gauss_newton(result),
        _formula(result),
        _exact_law(result),
    ]


def exponent(law: Law) -> str:
    """`N^+0.31 [+0.25, +0.36], supported`."""
    words = "supported" if law.supported else f"no law: {law.words}"
    return f"{law.variable}^{law.exponent:+.2f} [{law.low:+.2f}, {law.high:+.2f}], {words}"


def _exponent(result: Scaling, quantity: str, variable: str, published: float, claim: str) -> Claim:
    """A power law with a given exponent: there is a law, and its interval holds the exponent."""
    law = result.law(quantity, variable)
    holds = law.supported and law.low <= published <= law.high
    return Claim(claim, f"{variable}^{published:+.2f}", exponent(law), HOLDS if holds else FAILS, *ARTICLE)


def _sign(result: Scaling, quantity: str, variable: str, sign: int, claim: str) -> Claim:
    """It grows or falls: the interval of the exponent is on one side of zero, whether or not it is a law."""
    law = result.law(quantity, variable)
    low, high = sorted((sign * law.low, sign * law.high))
    verdict = HOLDS if low > 0 else FAILS if high < 0 else OPEN
    if verdict == HOLDS and min(sign * law.first, sign * law.last) < 0:
        verdict = PARTLY
    said = f"{'grows' if sign > 0 else 'falls'} with {variable}"
    if quantity == "spread":
        said = "condition number falls with D (here: λ_max over the mean eigenvalue of the GGN)"
    return Claim(claim, said, exponent(law), verdict, *ARTICLE)


def _one_curve(result: Scaling) -> Claim:
    """The article draws one and the same curve over N and over D."""
    n, d = result.law("lambda_max", "N"), result.law("lambda_max", "D")
    apart = n.low > d.high or d.low > n.high
    shown = ", ".join(
        f"{law.variable}^{law.exponent:+.2f} [{law.low:+.2f}, {law.high:+.2f}]" for law in (n, d)
    )
    verdict = FAILS if apart else OPEN
    return Claim("one curve of λ_max serves N and D", "the same numbers", shown, verdict, *ARTICLE)


def _gradient(result: Scaling) -> Claim:
    """The eigenvalue of ∇L ∇Lᵀ for that of H."""
    ratio = result.values("gradient_squared")[:, 0] / result.values("lambda_max")[:, 0]
    near = ((ratio < NEAR) & (ratio > 1 / NEAR)).all()
    shown = f"‖∇L‖²/λ_max from {ratio.min():.1e} to {ratio.max():.1e}"
    return Claim(
        "the top eigenvalue of ∇L ∇Lᵀ is the Hessian's",
        f"within a factor of {NEAR:g}",
        shown,
        HOLDS if near else FAILS,
        *ARTICLE,
    )


def _gauss_newton(result: Scaling) -> Claim:
    gap = result.values("gap")[:, 0]
    shown = f"‖H − H_o‖_F/‖H‖_F from {gap.min():.2f} to {gap.max():.2f}, median {np.median(gap):.2f}"
    verdict = HOLDS if gap.max() <= SMALL else FAILS
    return Claim("the GGN stands for the Hessian", f"at most {SMALL:g}", shown, verdict, *PRECURSOR)


def _formula(result: Scaling) -> Claim:
    """The data for a tolerance as (1/τ)²."""
    needed = [cell.needed for cell in result.cells]
    said = (1 / needed[0].tolerance) ** 2
    inside = all(n.k_low <= said <= n.k_high for n in needed)
    ks = [n.k for n in needed]
    shown = f"{min(ks)} to {max(ks)} sequences by Var/(k(k+1)) ≤ τ²"
    tau = needed[0].tolerance
    return Claim(
        f"the data for a tolerance τ are (1/τ)², τ = {tau:g}",
        f"{said:.0f}",
        shown,
        HOLDS if inside else FAILS,
        *ARTICLE,
    )


def _exact_law(result: Scaling) -> Claim:
    """Mean of measured over predicted E(ΔL)², over cells whose k was checked on fresh data."""
    checked = [n for n in (cell.needed for cell in result.cells) if n.rounds]
    ratios = np.array([n.rms**2 * n.k * (n.k + 1) / n.variance for n in checked])
    claim, said = "E(L_{k+1} − L_k)² = Var/(k(k+1)), on fresh data", "measured / predicted = 1"
    if len(ratios) < 2:
        return Claim(claim, said, "too few fresh sequences", OPEN, *OURS)
    half = student(len(ratios) - 1) * ratios.std(ddof=1) / math.sqrt(len(ratios))
    mean = float(ratios.mean())
    right = sum(bool(n.right) for n in checked)
    shown = f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]; within τ in {right} of {len(checked)} cells"
    return Claim(claim, said, shown, HOLDS if abs(mean - 1) <= half else FAILS, *OURS)
