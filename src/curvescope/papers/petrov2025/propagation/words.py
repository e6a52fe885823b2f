"""What is said about the sweeps: the numbers to look at first, tables, captions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.numbers import plural
from curvescope.models.zoo.names import REVISIONS
from curvescope.papers.petrov2025.propagation.slopes import exponent, spectra, with_and_without
from curvescope.papers.petrov2025.propagation.variants import COMPONENTS
from curvescope.runs.shown import Line
from curvescope.studies.propagation.shares import HESSIAN, OUTER

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.papers.petrov2025.propagation.study import Spectrum, Sweeps
    from curvescope.studies.propagation import Propagation


def summary(result: Sweeps) -> list[Line]:
    """How ‖H‖ grows with depth, and what the strongest component does."""
    found = []
    for norm in ("pre", "post", "none"):
        value, low, high = exponent(result, norm)
        words = f"‖H‖ ∝ depth^p at initialization, norms {norm}; 95 % interval {low:.2f} to {high:.2f}"
        found.append((f"growth with depth, {norm}", f"{value:.2f}", words))
    for name in list(COMPONENTS)[1:]:
        ratio, low, high = with_and_without(result, name, result.steps)
        words = (
            f"times: λ_max with {name} over that of the whole model, trained; seeds {low:.2g} to {high:.2g}"
        )
        found.append((f"λ_max, {name}", f"{ratio:.3g}", words))
    return found


def tables(result: Sweeps) -> dict[str, pd.DataFrame]:
    """One row a model; one a component, geometric means over seeds."""
    import pandas as pd

    models = [{"model": name, **_numbers(one)} for name, one in result.measured.items()]
    components = [
        _component(name, steps, spectra(result, name, steps))
        for name in COMPONENTS
        for steps in (0, result.steps)
    ]
    return {"models": pd.DataFrame(models), "components": pd.DataFrame(components)}


def _numbers(one: Propagation) -> dict[str, Any]:
    norm, trace, share = one.shares.norm(HESSIAN), one.shares.trace(HESSIAN), one.shares.share(OUTER)
    top, error, low, low_error = one.ends_of(HESSIAN)
    strongest = max(one.sources, key=lambda name: one.shares.norm(name).value)
    return {
        "parameters": one.num_parameters, "loss": one.loss, "frobenius": norm.value,
        "frobenius_stderr": norm.stderr, "trace": trace.value, "trace_stderr": trace.stderr,
        "lambda_max": top, "lambda_max_error": error, "lambda_min": low, "lambda_min_error": low_error,
        "share_ggn": share.value, "share_ggn_stderr": share.stderr, "strongest_source": strongest,
        "strongest_norm": one.shares.norm(strongest).value, "adds_up_to": one.shares.residual,
    }  # fmt: skip


def _component(name: str, steps: int, spectra: list[Spectrum]) -> dict[str, Any]:
    tops = np.array([s.values[-1] for s in spectra])
    return {
        "component": name,
        "trained_steps": steps,
        "lambda_max": math.exp(np.log(tops).mean()),
        "lambda_max_least": tops.min(),
        "lambda_max_largest": tops.max(),
        "lambda_min": float(np.mean([s.values[0] for s in spectra])),
        "trace": float(np.mean([s.values.sum() for s in spectra])),
        "condition": math.exp(np.mean([math.log(s.condition) for s in spectra])),
        "negative": float(np.mean([(s.values < -1e-12 * s.values[-1]).mean() for s in spectra])),
        "loss": float(np.mean([s.loss for s in spectra])),
    }


def captions(result: Sweeps) -> dict[str, str]:
    """What each figure and table shows."""
    seeds = plural(result.seeds, "seed")
    return {
        "depth": "‖H‖ and λ_max at initialization against the number of layers, by where the norms stand "
        f"({seeds}; bars are 95 % intervals over probes), and the shares of ‖H‖² by kind of source, means "
        "over seeds.",
        "sigma": "Frobenius norm of the first norm's own source against the scale of what it is given: the "
        "second derivative of a norm grows as 1/σ².",
        "components": "Largest eigenvalue, condition and trace of the whole Hessian with parts switched off, "
        f"at initialization and after {result.steps} steps ({seeds}, all eigenvalues exact). Condition: "
        "λ_max over the least eigenvalue that is positive beyond rounding; negative: share below zero.",
        "training": f"The bundled model at its checkpoints {', '.join(REVISIONS)}: Frobenius norms of its "
        "sources, added up by kind, and extreme eigenvalues.",
        "models": "One row a model: norm, trace and extreme eigenvalues of the Hessian, share of the GGN, "
        "and the strongest source.",
    }
