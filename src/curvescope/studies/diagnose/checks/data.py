"""The data: sequences that dominate, copies, and how much λ_max depends on which are chosen."""

from __future__ import annotations

import math

import numpy as np

from curvescope.core.numbers import plural, rounded
from curvescope.studies.diagnose.checks import limits
from curvescope.studies.diagnose.checks.seen import Seen, batch_spread
from curvescope.studies.diagnose.finding import Finding, judged, unseen

FEW = 4  # sequences, of which none can be called unusual


def sharp_sequences(seen: Seen) -> Finding:
    """The largest trace of a sequence's GGN over the median one."""
    name, samples = "sharp_sequences", seen.samples
    if samples.why:
        return unseen(name, samples.why)
    if len(samples.traces) < FEW:
        return unseen(name, f"{plural(len(samples.traces), 'sequence')}: too few to call one unusual")
    middle = float(np.median(samples.traces))
    if not middle > 0:
        return unseen(name, "the median sequence has no curvature")
    at = int(samples.traces.argmax())
    value, error = float(samples.traces[at]) / middle, float(samples.traces_stderr[at]) / middle
    sharp = samples.numbers[samples.traces > limits.SHARP * middle]
    return judged(
        Finding(
            name=name,
            severity="warning",
            value=value,
            error=error,
            limit=limits.SHARP,
            unit="trace over the median sequence's",
            where="sequence " + ", ".join(map(str, sharp[:6].tolist() or [int(samples.numbers[at])])),
            meaning=f"{plural(max(len(sharp), 1), 'sequence')} {'bends' if len(sharp) < 2 else 'bend'} the "
            "loss "
            f"up to {rounded(value, 3)} times as sharply as the median one "
            f"(loss {rounded(float(samples.losses[at]), 3)})",
            advice="look at these sequences: other text than the rest? Clip gradients",
            evidence="Katharopoulos and Fleuret 2018, Not All Samples Are Created Equal; healthy models of "
            "benchmarks/results/diagnosis",
        )
    )


def steep_sequences(seen: Seen) -> Finding:
    """The largest norm of a sequence's gradient over the median one: exact, for this data."""
    name, samples = "steep_sequences", seen.samples
    if samples.why:
        return unseen(name, samples.why)
    norms = samples.gradient_norms
    middle = float(np.median(norms)) if len(norms) else 0.0
    if len(norms) < FEW or not middle > 0:
        return unseen(name, f"{plural(len(norms), 'sequence')} with a gradient: too few to call one unusual")
    at, steep = int(norms.argmax()), samples.numbers[norms > limits.STEEP * middle]
    value = float(norms[at]) / middle
    return judged(
        Finding(
            name=name,
            severity="warning",
            value=value,
            error=0.0,
            limit=limits.STEEP,
            unit="gradient norm over the median sequence's",
            where="sequence " + ", ".join(map(str, steep[:6].tolist())),
            meaning=f"{plural(len(steep), 'sequence')} with a gradient up to {rounded(value, 3)} times the "
            "median one "
            f"(loss {rounded(float(samples.losses[at]), 3)}): the step of a batch is theirs",
            advice="look at these sequences: wrong labels, rubbish, other text than the rest; clip gradients",
            evidence="Katharopoulos and Fleuret 2018, Not All Samples Are Created Equal; "
            "benchmarks/results/diagnosis: planted rubbish",
        )
    )


def duplicates(seen: Seen) -> Finding:
    """Share of sequences that equal an earlier one, counted."""
    copies = seen.samples.copies
    again = np.nonzero(copies != np.arange(len(copies)))[0]
    value = len(again) / len(copies)
    return judged(
        Finding(
            name="duplicates",
            severity="warning",
            value=value,
            error=0.0,
            limit=limits.COPIES,
            unit="share of sequences that are copies",
            where="sequence " + ", ".join(f"{i} = {copies[i]}" for i in again[:4]) if len(again) else "",
            meaning=f"{len(again)} of {plural(len(copies), 'sequence')} are there before, token for token: "
            "they "
            "count twice in loss and curvature",
            advice="take copies out of the data",
            evidence="Lee et al. 2022, Deduplicating Training Data Makes Language Models Better; counted "
            "exactly; "
            "benchmarks/results/diagnosis: planted copies",
        )
    )


def batch_choice(seen: Seen) -> Finding:
    """Standard deviation of λ_max over disjoint parts of the data, relative to its mean."""
    name, count = "batch_choice", len(seen.parts.top)
    value, error = batch_spread(seen.parts)
    if math.isnan(value):
        return unseen(name, "the data have no two parts with curvature above zero")
    low, high = float(seen.parts.top.min()), float(seen.parts.top.max())
    return judged(
        Finding(
            name=name,
            severity="warning",
            value=value,
            error=error,
            limit=limits.BATCH,
            unit="spread of λ_max over parts of the data",
            where="",
            meaning=f"λ_max goes from {rounded(low, 3)} to {rounded(high, 3)} over {count} disjoint parts: a "
            "ceiling "
            "from one batch says little of the next",
            advice="larger batches, a learning rate with room below the ceiling, clipped gradients",
            evidence="McCandlish et al. 2018, An Empirical Model of Large-Batch Training; "
            "benchmarks/results/diagnosis: planted rubbish",
        )
    )
