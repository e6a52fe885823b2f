"""The tables of the study `landscape`, from its arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.closed_form.landscape import gradient_mean_square, increment_bound
from curvescope.studies.landscape.points import Direct, error_of

if TYPE_CHECKING:
    import pandas as pd

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
