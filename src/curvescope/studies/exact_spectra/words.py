"""What is said about exact spectra: the numbers to look at first, and captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import plural
from curvescope.runs.shown import Line
from curvescope.studies.exact_spectra import ladder, sweeps
from curvescope.studies.exact_spectra.intervals import median

if TYPE_CHECKING:
    from curvescope.studies.exact_spectra.study import ExactSpectra

CONTROL_NOTE = (
    "a random symmetric matrix is nearly paired too: a pairing near 1 is no evidence of structure, exact "
    "pairs are"
)
SHOWN = (sweeps.NORM_Q, sweeps.ANGLE, sweeps.VALUE, sweeps.LENGTH, sweeps.TARGET, sweeps.OUTLIER, sweeps.BIAS)


def summary(result: ExactSpectra) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    errors = result.spectra.errors()
    worst = max(errors, key=lambda name: errors[name])
    found: list[Line] = [
        (
            "closed form against dense",
            f"{errors[worst]:.1e}",
            f"largest error of an eigenvalue over the largest, {plural(len(errors), 'case')}; worst: {worst}",
        )
    ]
    for varied in SHOWN:
        _, condition = result.sweeps.of(varied).medians("condition")
        words = f"condition number over the values of {varied}, median over seeds"
        found.append((f"{varied} moves κ", f"{condition.min():.3g} to {condition.max():.3g}", words))
    for (match, scale, residual), (one, other, _) in result.gaps.differences().items():
        if scale == residual == 1:
            words = f"relative error of λ_max: attention beside an MLP of as many parameters, {other}"
            found.append((f"GGN for H, {match}", str(one), words))
    for rung in ("1-D attention", "d = d_K = 4"):
        exact = median(result.pairings.of(rung, ladder.EXACT))
        found.append((f"exact pairs, {rung}", str(exact), "share of eigenvalues that come as ±λ"))
    return [*found, *(("note", "", note) for note in result.notes)]


def captions(result: ExactSpectra) -> dict[str, str]:
    """What each figure and table shows."""
    seeds = plural(len(np.unique(result.sweeps.seed)), "draw")
    draws = plural(len(np.unique(result.gaps.draw)), "draw")
    base = (
        "Otherwise ‖w_Q‖ = ‖w_K‖ = 2, 60° between them, w_V = 1, 16 normal tokens and targets, squared "
        f"error. Medians over {seeds} of tokens and targets, bands between their quartiles."
    )
    formula = (
        "P = 1 − Σ|p_i − n_i| / Σ(p_i + n_i) of the positive eigenvalues p and the sizes n of the negative "
        "ones, both descending: 1 is symmetric, 0 has one sign."
    )
    return {
        "spectra": "Every eigenvalue in closed form next to that of a dense Hessian in float64, written out "
        "by double backward. The bulk ±b is what is repeated, outliers are the rest.",
        "agreement": "Largest difference of an eigenvalue in closed form from that of the dense Hessian, "
        "over the largest eigenvalue's size, for every case.",
        "sweeps": f"Exact spectra of attention on scalars: bulk |b| and the three outliers. {base}",
        "condition": f"Condition number max |λ| / min |λ| over eigenvalues that are not zero. {base}",
        "ggn_gap": "Relative error of λ_max if the GGN is taken for the Hessian, for attention and a ReLU "
        f"MLP of as many parameters at equal loss; medians over {draws} of weights and data with 95 % "
        "intervals of the bootstrap. Targets are outputs plus ρ times normal numbers. `block` is a head and "
        "a feed-forward layer with skip connections.",
        "pairing": f"{formula} Outliers are the three largest eigenvalues of each sign that are not "
        "repeated. Exact pairs: the share of eigenvalues whose negative is one too, to 1e-9 of the largest. "
        "H_f: the functional Hessian. An assumption less on each rung; medians over draws with intervals of "
        "the bootstrap, of the bundled model one text and no interval. The control: "
        f"{CONTROL_NOTE}.",
    }
