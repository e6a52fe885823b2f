"""The words of what a monitor has seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import plural, with_error
from curvescope.runs.shown import Line

if TYPE_CHECKING:
    from curvescope.monitor.result import Monitored


def summary(result: Monitored) -> list[Line]:
    """The numbers to look at first."""
    h = result.history
    if not len(h["step"]):
        return [("measurements", "0", "nothing was measured")]
    count, sure = len(h["step"]), int((h["converged"] == 1).sum())
    span = f"steps {h['step'][0]:.0f} to {h['step'][-1]:.0f}, {sure} of them converged"
    found = [("measurements", f"{count}", span)]
    found += [line for line in (_largest(h), _ceiling(h), _lowest(h), _trace(h), _gap(h)) if line]
    share = f"{h['products'].sum():,.0f} products, {h['cost_seconds'].sum():.3g} s"
    found.append(
        ("share of the time", f"{100 * h['share'][-1]:.1f} %", f"of {100 * result.budget:g} %: {share}")
    )
    return found


def opening(result: Monitored) -> str:
    """Where λ_max began, was highest and ended, and whether the optimizer crossed its threshold."""
    h = result.history
    known = np.flatnonzero(np.isfinite(h["lambda_max"]))
    if not len(known):
        return "No λ_max was measured."
    first, last, top = int(known[0]), int(known[-1]), int(np.nanargmax(h["lambda_max"]))
    ends = [
        f"{with_error(h['lambda_max'][i], h['lambda_max_error'][i])} at step {h['step'][i]:.0f}"
        for i in (first, last)
    ]
    said = f"λ_max goes from {ends[0]} to {ends[1]}" if last > first else f"λ_max is {ends[0]}"
    if top not in (first, last):
        said += f", highest at step {h['step'][top]:.0f} ({h['lambda_max'][top]:.4g})"
    ratio, what = _ratio(h)
    if not np.isfinite(ratio).any():
        return f"{said}."
    above = int((ratio > 1).sum())
    crossed = f"at {above} of {plural(int(np.isfinite(ratio).sum()), 'measurement')}" if above else "nowhere"
    return f"{said}. {what} is above 1, where steps on the quadratic diverge, {crossed}."


def _ratio(h: dict[str, np.ndarray]) -> tuple[np.ndarray, str]:
    """How near the optimizer is to its threshold, by what it sees where that is known, and its name."""
    ratio = h["lr_sharpness"] / h["sharpness_threshold"]
    if np.isfinite(ratio).any():
        return ratio, "η · sharpness / threshold"
    return h["lr_lambda_max"] / h["threshold"], "η λ_max / threshold"


def _last(h: dict[str, np.ndarray], name: str) -> int | None:
    """Where a column was measured last."""
    there = np.flatnonzero(np.isfinite(h[name]))
    return int(there[-1]) if len(there) else None


def _largest(h: dict[str, np.ndarray]) -> Line | None:
    i = _last(h, "lambda_max")
    if i is None:
        return None
    top = int(np.nanargmax(h["lambda_max"]))
    words = f"at step {h['step'][i]:.0f}; largest {h['lambda_max'][top]:.4g} at step {h['step'][top]:.0f}"
    return "λ_max", with_error(h["lambda_max"][i], h["lambda_max_error"][i]), words


def _ceiling(h: dict[str, np.ndarray]) -> Line | None:
    """The step at which the optimizer was nearest to its threshold, or furthest beyond it."""
    ratio, what = _ratio(h)
    if not np.isfinite(ratio).any():
        return None
    top, above = int(np.nanargmax(ratio)), int((ratio > 1).sum())
    times = f"above 1, unstable on the quadratic, at {plural(above, 'measurement')}"
    return what, f"{ratio[top]:.3g}", f"the largest, at step {h['step'][top]:.0f}; {times}"


def _lowest(h: dict[str, np.ndarray]) -> Line | None:
    i = _last(h, "lambda_min")
    if i is None:
        return None
    ratio = abs(h["lambda_min"][i] / h["lambda_max"][i]) if h["lambda_max"][i] else np.nan
    return "λ_min", with_error(h["lambda_min"][i], h["lambda_min_error"][i]), f"|λ_min| / λ_max = {ratio:.2g}"


def _trace(h: dict[str, np.ndarray]) -> Line | None:
    i = _last(h, "trace")
    if i is None:
        return None
    return "trace", with_error(h["trace"][i], h["trace_stderr"][i]), f"at step {h['step'][i]:.0f}"


def _gap(h: dict[str, np.ndarray]) -> Line | None:
    i = _last(h, "ggn_gap")
    if i is None:
        return None
    words = f"at step {h['step'][i]:.0f}; λ_max of the GGN {h['ggn_lambda_max'][i]:.4g}"
    return "‖H − GGN‖ / ‖H‖", with_error(h["ggn_gap"][i], h["ggn_gap_stderr"][i]), words


def captions(result: Monitored) -> dict[str, str]:
    """What each figure and table shows."""
    where = f"of {result.model} on {result.num_terms:,.0f} terms of {result.data}, which stay the same"
    return {
        "course": f"Numbers {where}, over the steps; bands are errors; of λ_max with its ceiling.",
        "stability": f"Left: λ_max of the Hessian {where}, with a band of its error, min(r, r²/gap) of the "
        "Lanczos residual r; dashed: the ceiling, the threshold of the optimizer's momentum over its "
        "learning rate η. Right: η times λ_max over the threshold, for the Hessian and for what the "
        "optimizer sees, P^(−½) (H + weight decay) P^(−½) with its own diagonal P as it was then; steps "
        "on the quadratic diverge above 1.",
        "training": "Loss and norm of its gradient on the probe batches, in eval mode.",
        "curvature": "Trace with its standard error over probes, exact inside the subspace of the "
        "eigenvectors; the smallest eigenvalue; and shares: overlap of the top eigenvectors with those of "
        "the measurement before, part of ‖∇L‖² in their span, and how far the Gauss–Newton matrix is "
        "from the Hessian.",
        "blocks_lambda_max": "λ_max of every block of the Hessian; a block that was not measured at a step "
        "has the colour of the last time, white before the first.",
        "blocks_trace": "Trace of every block, from the probes of the whole; blue is below zero, red above.",
        "history": "One row a measurement; empty where the budget left a part out.",
        "blocks": "One row a block and measurement.",
    }
