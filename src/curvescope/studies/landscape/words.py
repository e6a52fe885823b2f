"""Summary and captions of the study `landscape`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import plural, with_error
from curvescope.runs.shown import Line
from curvescope.studies.landscape import growth
from curvescope.studies.landscape.claims import claims, interval
from curvescope.studies.landscape.points import error_of

if TYPE_CHECKING:
    from curvescope.studies.landscape.study import Landscape


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
        f"values, _smoothed their exponential moving average ({growth.EMA}), as published; ± is a standard "
        "error over orders, a band two of them. Nothing here knows the Hessian.",
        "claims": "What is said of the landscape as data grow, next to what was measured here; every verdict "
        "follows from the numbers beside it.",
        "slopes": "Model and control side by side; 95 % intervals by resampling the orders. The law's slope "
        f"is fitted at the same k, from {growth.FIRST} on.",
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
