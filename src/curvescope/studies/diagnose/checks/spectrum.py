"""The spectrum as a whole: negative curvature, the bulk beside the sharpest direction; and the loss."""

from __future__ import annotations

import math

import numpy as np

from curvescope.core.numbers import rounded
from curvescope.studies.diagnose.checks import limits
from curvescope.studies.diagnose.checks.seen import Seen
from curvescope.studies.diagnose.finding import Finding, judged, unseen

OUTLIER = 0.2  # τ of outliers, of λ_max


def negative_curvature(seen: Seen) -> Finding:
    """−λ_min / λ_max: how deep the steepest direction downwards bends beside the sharpest upwards."""
    name, ends = "negative_curvature", seen.whole.lines.ends()
    top, bottom = float(ends.top[0]), float(ends.bottom[0])
    if top <= 0:
        return unseen(name, f"λ_max is {top:.3g}, there is nothing to compare with")
    value = max(-bottom, 0.0) / top
    error = math.hypot(float(ends.bottom_error[0]), value * float(ends.top_error[0])) / top
    return judged(
        Finding(
            name=name,
            severity="warning",
            value=value,
            error=error,
            limit=limits.NEGATIVE if seen.learned else limits.NEGATIVE_FRESH,
            unit="−λ_min / λ_max",
            where="",
            meaning=f"λ_min = {rounded(bottom, 3)} beside λ_max = {rounded(top, 3)}: the loss bends down "
            "more sharply "
            "than up, so a quadratic model with damping says little of the next step",
            advice="small steps until the loss has fallen, or look for what bends down: saturated heads, a "
            "scaled layer",
            evidence="Dauphin et al. 2014, Identifying and attacking the saddle point problem; "
            "benchmarks/results/diagnosis: planted saturated",
        )
    )


def condition(seen: Seen) -> Finding:
    """λ_max over the Frobenius norm of the bulk, √n times its width: free of the model's size."""
    name, lines = "condition", seen.whole.lines
    if seen.top <= 0:
        return unseen(name, "λ_max is not positive")
    width = lines.split(np.array([OUTLIER * seen.top])).width[0]
    per_probe = seen.top / (width * math.sqrt(seen.whole.size))
    value = float(per_probe.mean())
    error = float(per_probe.std(ddof=1) / math.sqrt(len(per_probe))) if len(per_probe) > 1 else math.nan
    ratio = seen.top / float(width.mean())
    return judged(
        Finding(
            name=name,
            severity="note",
            value=value,
            error=error,
            limit=limits.CONDITION,
            unit="λ_max / (√n · width of the bulk)",
            where="",
            meaning=f"λ_max is {rounded(ratio, 3)} times the width of the bulk: few directions set the "
            "learning rate "
            "of all others",
            advice="a preconditioner (Adam), or a look at the block that the sharpest direction lies in",
            evidence="Ghorbani, Krishnan and Xiao 2019, An Investigation into Neural Net Optimization via "
            "Hessian "
            "Eigenvalue Density; benchmarks/results/diagnosis: planted layer",
        )
    )


def confidence(seen: Seen) -> Finding:
    """The loss over log V: above it, the model is surer than it is right."""
    name, loss, uniform = "confidence", seen.whole.loss, seen.whole.uniform
    if math.isnan(uniform) or uniform == 0:
        return unseen(name, "the loss is no cross-entropy over classes")
    losses = seen.samples.losses
    error = float(losses.std(ddof=1) / math.sqrt(len(losses))) / uniform if len(losses) > 1 else math.nan
    return judged(
        Finding(
            name=name,
            severity="warning",
            value=loss / uniform,
            error=error,
            limit=limits.CONFIDENT,
            unit="loss / log V",
            where="",
            meaning=f"the loss {rounded(loss, 3)} is above log V = {rounded(uniform, 3)}, that of equal "
            "probabilities: "
            "logits are large and wrong",
            advice="a smaller scale of the unembedding (or of tied embeddings); is the tokenizer the model's "
            "own?",
            evidence="loss of equal probabilities, log V; benchmarks/results/diagnosis: planted logits",
        )
    )
