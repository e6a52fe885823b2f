"""What is said about the grid: the numbers to look at first, and captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.core.numbers import plural
from curvescope.runs.shown import Line
from curvescope.studies.scaling.claims import exponent
from curvescope.studies.scaling.laws import LEVEL, RESIDUAL
from curvescope.studies.scaling.quantities import QUANTITIES
from curvescope.studies.scaling.cell import LENGTH, VOCAB

if TYPE_CHECKING:
    from curvescope.studies.scaling.study import Scaling

LAW_COLUMNS = (
    "quantity", "variable", "exponent", "low", "high", "supported", "words", "residual",
    "p_constant", "p_bend", "p_other", "first", "last",
)  # fmt: skip
TESTS = (
    f"supported: told from a constant (F-test, p < {LEVEL:g}), no bend and no dependence on the other "
    f"variable (F-tests, p ≥ {LEVEL:g}), scatter around the line at most {RESIDUAL:g} in logarithms"
)


def summary(result: Scaling) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    n, d = result.variable("N"), result.variable("D")
    losses = [cell.held_out_loss for cell in result.cells]
    laws = [law for law in result.laws if law.supported]
    needed = [cell.needed for cell in result.cells]
    ks = [one.k for one in needed]
    found = [
        (
            "grid",
            plural(len(result.cells), "cell"),
            f"N = {n.min():,.0f} to {n.max():,.0f} parameters, D = {d.min():,.0f} to {d.max():,.0f} tokens",
        ),
        (
            "held-out loss",
            f"{min(losses):.3f} to {max(losses):.3f}",
            f"no model of this language has less than {result.least_loss:.3f}",
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
            f"sequences until one more moves the mean loss by at most {needed[0].tolerance:g} nats, rms",
        ),
        *((c.verdict, "", f"{c.claim}: {c.measured}") for c in result.claims()),
    ]
    return [*found, *(("note", "", note) for note in result.notes)]


HEADLINES = (("excess_loss", "D"), ("lambda_max", "N"), ("lambda_max", "D"), ("effective_rank", "N"))


def captions(result: Scaling) -> dict[str, str]:
    """What each figure and table shows."""
    data = "the training data" if result.curvature_on == "train" else "held-out data"
    how = (
        f"Transformers of several widths, trained for {result.steps} steps on D tokens of a Markov language "
        f"({VOCAB} letters, sequences of {LENGTH}); the Hessian is that of the loss on {data}, at most "
        f"{result.measured} sequences. Weights, data and probes of each cell are its own."
    )
    laws = (
        "Exponents of power laws over N at fixed D and over D at fixed N, with 95 % intervals of the "
        f"bootstrap over cells and seeds; {TESTS}. first and last: exponents between the two least sizes, "
        "and between the two largest."
    )
    return {
        "scaling": f"{how} λ_max and λ_min from Lanczos steps: an eigenvalue lies within the error, and all "
        "of them between lambda_min_low and lambda_max_high, 95 times in 100. Lines: the fitted power law, "
        "solid where it is supported, dotted where it is not.",
        "exponents": f"{laws} Filled: supported.",
        "laws": laws,
        "data_needed": "Left: sequences that a tolerance needs by the exact law E(ΔL)² = Var/(k(k+1)), with "
        "the interval that the variance leaves. Right: root mean square of L_{k+1} − L_k at that k on fresh "
        "sequences, over the tolerance; bars are 95 % intervals.",
    }
