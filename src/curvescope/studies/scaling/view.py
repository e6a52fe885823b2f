"""Tables, claims, figures and captions of the study `scaling`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.number_format import plural
from curvescope.runs.study_result import FAILS, HOLDS, OPEN, Claim, Line, Origin, Tables
from curvescope.studies.common.columns import pick
from curvescope.studies.common.statistics import mean_interval
from curvescope.studies.scaling.analysis import LENGTH, LEVEL, QUANTITIES, RESIDUAL, VARIABLES, VOCAB, row
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE
from curvescope.viz.style import plain_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.scaling.analysis import PowerLaw
    from curvescope.studies.scaling.study import Scaling


def tables(result: Scaling) -> Tables:
    """One row per cell and seed, and one per quantity and variable."""
    laws = [pick(law, *LAW_COLUMNS) for law in result.laws]
    return {"scaling": [row(cell) for cell in result.cells], "laws": laws}


PARTLY = "in part"  # true overall, but not between the two smallest or the two largest sizes
ARTICLE: Origin = ("article", "article")
PRECURSOR: Origin = ("arXiv 2409.11995", "paper")
OURS: Origin = ("exact law", "ours")
NEAR = 2.0  # two numbers within this factor are called equal
SMALL = 0.1  # relative to ‖H‖_F: a part this small may be neglected


def claims(result: Scaling) -> list[Claim]:
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


def exponent(law: PowerLaw) -> str:
    """Format an exponent, such as `N^+0.31 [+0.25, +0.36], supported`."""
    words = "supported" if law.supported else f"not a law: {law.words}"
    return f"{law.variable}^{law.exponent:+.2f} [{law.low:+.2f}, {law.high:+.2f}], {words}"


def _exponent(result: Scaling, quantity: str, variable: str, published: float, claim: str) -> Claim:
    """Claim of a power law: it holds if the law is supported and its interval contains the exponent."""
    law = result.law(quantity, variable)
    holds = law.supported and law.low <= published <= law.high
    return Claim(claim, f"{variable}^{published:+.2f}", exponent(law), HOLDS if holds else FAILS, *ARTICLE)


def _sign(result: Scaling, quantity: str, variable: str, sign: int, claim: str) -> Claim:
    """Claim that a quantity grows or falls: its exponent is on one side of zero, law or not."""
    law = result.law(quantity, variable)
    low, high = sorted((sign * law.low, sign * law.high))
    verdict = HOLDS if low > 0 else FAILS if high < 0 else OPEN
    if verdict == HOLDS and min(sign * law.first, sign * law.last) < 0:
        verdict = PARTLY
    published = f"{'grows' if sign > 0 else 'falls'} with {variable}"
    if quantity == "spread":
        published = "condition number falls with D (here: λ_max over the mean eigenvalue of the GGN)"
    return Claim(claim, published, exponent(law), verdict, *ARTICLE)


def _one_curve(result: Scaling) -> Claim:
    """Claim of the article that one curve describes λ_max over N and over D."""
    n, d = result.law("lambda_max", "N"), result.law("lambda_max", "D")
    shown = ", ".join(
        f"{law.variable}^{law.exponent:+.2f} [{law.low:+.2f}, {law.high:+.2f}]" for law in (n, d)
    )
    verdict = FAILS if n.low > d.high or d.low > n.high else OPEN
    claim = "λ_max follows the same curve over N and over D"
    return Claim(claim, "equal exponents", shown, verdict, *ARTICLE)


def _gradient(result: Scaling) -> Claim:
    """Claim that the eigenvalue of ∇L ∇Lᵀ approximates that of H."""
    ratio = result.values("gradient_squared")[:, 0] / result.values("lambda_max")[:, 0]
    verdict = HOLDS if ((ratio < NEAR) & (ratio > 1 / NEAR)).all() else FAILS
    shown = f"‖∇L‖²/λ_max from {ratio.min():.1e} to {ratio.max():.1e}"
    claim = "the top eigenvalue of ∇L ∇Lᵀ is the Hessian's"
    return Claim(claim, f"within a factor of {NEAR:g}", shown, verdict, *ARTICLE)


def _gauss_newton(result: Scaling) -> Claim:
    gap = result.values("gap")[:, 0]
    shown = f"‖H − H_o‖_F/‖H‖_F from {gap.min():.2f} to {gap.max():.2f}, median {np.median(gap):.2f}"
    verdict = HOLDS if gap.max() <= SMALL else FAILS
    return Claim("the GGN can replace the Hessian", f"at most {SMALL:g}", shown, verdict, *PRECURSOR)


def _formula(result: Scaling) -> Claim:
    """Claim that a tolerance τ needs (1/τ)² samples."""
    needed = [cell.needed for cell in result.cells]
    published = (1 / needed[0].tolerance) ** 2
    inside = all(n.k_low <= published <= n.k_high for n in needed)
    ks = [n.k for n in needed]
    shown = f"{min(ks)} to {max(ks)} sequences by Var/(k(k+1)) ≤ τ²"
    claim = f"a tolerance τ needs (1/τ)² sequences, τ = {needed[0].tolerance:g}"
    return Claim(claim, f"{published:.0f}", shown, HOLDS if inside else FAILS, *ARTICLE)


def _exact_law(result: Scaling) -> Claim:
    """Mean of measured over predicted E(ΔL)², over cells whose k was checked on fresh data."""
    checked = [n for n in (cell.needed for cell in result.cells) if n.rounds]
    ratios = np.array([n.rms**2 * n.k * (n.k + 1) / n.variance for n in checked])
    claim, published = "E(L_{k+1} − L_k)² = Var/(k(k+1)), on fresh data", "measured / predicted = 1"
    if len(ratios) < 2:
        return Claim(claim, published, "too few fresh sequences", OPEN, *OURS)
    one = mean_interval(ratios)
    right = sum(bool(n.right) for n in checked)
    shown = f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]; within τ in {right} of {len(checked)} cells"
    return Claim(claim, published, shown, HOLDS if one.low <= 1 <= one.high else FAILS, *OURS)


SHOWN = ("excess_loss", "lambda_max", "frobenius", "effective_rank", "gap")
GUIDE = -0.5  # exponent of D that the article draws


def figures(result: Scaling) -> dict[str, Figure]:
    """Quantities over N and D with their laws, all exponents, and the data needed for a tolerance."""
    return {"scaling": _grid(result), "exponents": _exponents(result), "data_needed": _needed(result)}


def _grid(result: Scaling) -> Figure:
    figure, axes = style.subplots(2, len(SHOWN), figsize=(3.0 * len(SHOWN) + 1.2, 6.4))
    for i, variable in enumerate(VARIABLES):
        for j, quantity in enumerate(SHOWN):
            _panel(axes[i][j], result, quantity, variable)
        axes[i][-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle("Loss and curvature over model size and data size")
    return figure


def _panel(ax: Axes, result: Scaling, quantity: str, variable: str) -> None:
    """Draw points of all seeds, one color per value of the other variable, and the fitted law."""
    other = "D" if variable == "N" else "N"
    x, z, q = result.variable(variable), result.variable(other), result.values(quantity)[:, 0]
    law = result.law(quantity, variable)
    ends = np.array([x.min(), x.max()])
    for i, value in enumerate(np.unique(z)):
        group = (z == value) & (q > 0)
        color = _color(i, len(np.unique(z)))
        ax.plot(x[group], q[group], "o", ms=3.5, color=color, label=f"{other} = {value:,.0f}", alpha=0.85)
        if np.isfinite(law.exponent):
            middle = np.exp(np.log(q[group]).mean() + law.exponent * (np.log(ends) - np.log(x[group]).mean()))
            ax.plot(ends, middle, "-" if law.supported else ":", lw=1, color=color)
    ax.set(xscale="log", yscale="log", xlabel=f"{variable}, {VARIABLES[variable]}")
    ax.set_xticks(np.unique(x), [_short(value) for value in np.unique(x)])
    ax.set_xticks([], minor=True)
    plain_numbers(ax)
    title = f"{QUANTITIES[quantity].symbol} ∝ {variable}$^{{{law.exponent:+.2f}}}$"
    ax.set_title(f"{title}\n[{law.low:+.2f}, {law.high:+.2f}]")
    ax.grid(visible=True)


def _short(count: float) -> str:
    """Format a count, such as `128`, `1.3k`, `0.8M`."""
    return f"{count:.0f}" if count < 1e3 else f"{count / 1e3:.1f}k" if count < 1e6 else f"{count / 1e6:.1f}M"


def _color(i: int, count: int) -> tuple[float, float, float]:
    """Color from dark blue to light green."""
    share = i / max(count - 1, 1)
    first, last = np.array([0.16, 0.12, 0.42]), np.array([0.55, 0.84, 0.27])
    red, green, blue = (first + share * (last - first)).tolist()
    return red, green, blue


def _exponents(result: Scaling) -> Figure:
    figure, axes = style.subplots(1, 2, figsize=(9.5, 4.2), sharey=True)
    names = list(QUANTITIES)
    for ax, variable in zip(axes, VARIABLES, strict=True):
        for i, name in enumerate(names):
            law = result.law(name, variable)
            face = PALETTE[0] if law.supported else "white"
            ax.plot([law.low, law.high], [-i, -i], "-", lw=1.6, color=PALETTE[0])
            ax.plot(law.exponent, -i, "o", ms=6, color=PALETTE[0], mfc=face)
        ax.axvline(0, color="0.4", lw=0.7)
        ax.set_title(f"exponent of {variable}, {VARIABLES[variable]}")
        ax.grid(visible=True)
    axes[1].axvline(GUIDE, color=PALETTE[1], lw=1, ls="--", label="1/√D")
    axes[1].legend()
    axes[0].set_yticks(-np.arange(len(names)), [QUANTITIES[name].symbol for name in names])
    return figure


def _needed(result: Scaling) -> Figure:
    figure, (left, right) = style.subplots(1, 2, figsize=(9.5, 3.8))
    n, d = result.variable("N"), result.variable("D")
    sizes, seeds = np.unique(n), max(cell.seed for cell in result.cells) + 1
    for i, size in enumerate(sizes):
        here = np.flatnonzero(n == size)
        needed = [result.cells[j].needed for j in here]
        seed = np.array([result.cells[j].seed for j in here])
        shifted = d[here] * 1.05 ** ((i * seeds + seed) - len(sizes) * seeds / 2)
        look = {"fmt": "o", "ms": 3, "lw": 0.8, "color": _color(i, len(sizes))}
        k = np.array([(one.k, one.k_low, one.k_high) for one in needed], dtype=float)
        left.errorbar(shifted, k[:, 0], yerr=style.error_bars(*k.T), label=f"N = {size:,.0f}", **look)
        r = np.array([(one.rms, one.rms_low, one.rms_high) for one in needed]) / needed[0].tolerance
        right.errorbar(shifted, r[:, 0], yerr=style.error_bars(*r.T), **look)
    title = f"sequences for τ = {result.cells[0].needed.tolerance:g} nats"
    left.set(yscale="log", ylabel="k (sequences)", title=title)
    left.legend()
    plain_numbers(left)
    right.axhline(1, color="0.4", lw=0.8)
    right.set(ylabel="rms of L$_{k+1}$ − L$_k$, relative to τ", title="check on fresh sequences")
    for ax in (left, right):
        ax.set(xscale="log", xlabel="D (training tokens)")
        ax.grid(visible=True)
    return figure


LAW_COLUMNS = (
    "quantity", "variable", "exponent", "low", "high", "supported", "words", "residual",
    "p_constant", "p_bend", "p_other", "first", "last",
)  # fmt: skip
TESTS = (
    f"supported: significantly different from a constant (F-test, p < {LEVEL:g}), no bend and no "
    f"dependence on the other variable (F-tests, p ≥ {LEVEL:g}), and residual scatter at most "
    f"{RESIDUAL:g} in the logarithm"
)


def summary(result: Scaling) -> list[Line]:
    """Return the main numbers, each with a label and an explanation."""
    n, d = result.variable("N"), result.variable("D")
    losses = [cell.held_out_loss for cell in result.cells]
    laws = [law for law in result.laws if law.supported]
    needed = [cell.needed for cell in result.cells]
    ks = [size.k for size in needed]
    lines = [
        (
            "grid",
            plural(len(result.cells), "cell"),
            f"N = {n.min():,.0f} to {n.max():,.0f} parameters, D = {d.min():,.0f} to {d.max():,.0f} tokens",
        ),
        (
            "held-out loss",
            f"{min(losses):.3f} to {max(losses):.3f}",
            f"the lowest possible mean loss on this language is {result.least_loss:.3f}",
        ),
        *((f"{QUANTITIES[q].symbol} over {v}", "", exponent(result.law(q, v))) for q, v in HEADLINES),
        (
            "laws supported",
            f"{len(laws)} of {len(result.laws)}",
            ", ".join(
                f"{QUANTITIES[law.quantity].symbol} ∝ {law.variable}^{law.exponent:+.2f}" for law in laws
            )
            or "none",
        ),
        (
            "data needed",
            f"{min(ks)} to {max(ks)}",
            f"sequences until one more changes the mean loss by at most {needed[0].tolerance:g} nats (rms)",
        ),
        *((c.verdict, "", f"{c.claim}: {c.measured}") for c in result.claims()),
    ]
    return [*lines, *(("note", "", note) for note in result.notes)]


HEADLINES = (("excess_loss", "D"), ("lambda_max", "N"), ("lambda_max", "D"), ("effective_rank", "N"))


def captions(result: Scaling) -> dict[str, str]:
    """Return the caption of each figure and table."""
    data = "the training data" if result.curvature_on == "train" else "held-out data"
    how = (
        f"Transformers of several widths, trained for {result.steps} steps on D tokens of a Markov "
        f"language ({VOCAB} symbols, sequences of {LENGTH}). The Hessian is that of the loss on {data}, "
        f"with at most {result.measured} sequences. Each cell has its own weights, data and probes."
    )
    laws = (
        "Exponents of power laws over N at fixed D and over D at fixed N, with 95 % bootstrap intervals "
        f"over cells and seeds; {TESTS}. first and last: exponents between the two smallest and the two "
        "largest sizes."
    )
    return {
        "scaling": f"{how} λ_max and λ_min come from Lanczos steps: an eigenvalue lies within the error, and "
        "all eigenvalues lie between lambda_min_low and lambda_max_high with 95 % confidence. Lines: "
        "fitted power laws, solid if supported, dotted if not.",
        "exponents": f"{laws} Filled markers: supported laws.",
        "laws": laws,
        "data_needed": "Left: sequences needed for the tolerance by the exact law E(ΔL)² = Var/(k(k+1)), "
        "with an interval from the uncertainty of the variance. Right: root mean square of L_{k+1} − "
        "L_k at this k on fresh sequences, relative to the tolerance; bars are 95 % intervals.",
    }
