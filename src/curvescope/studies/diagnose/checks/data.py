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
            name, "warning", value, error, limits.SHARP, "trace over the median sequence's",
            "sequence " + ", ".join(map(str, sharp[:6].tolist() or [int(samples.numbers[at])])),
            f"{plural(max(len(sharp), 1), 'sequence')} {'bends' if len(sharp) < 2 else 'bend'} the loss up to "
            f"{rounded(value, 3)} times as sharply as the median one (loss {rounded(float(samples.losses[at]), 3)})",
            "look at these sequences: other text than the rest, wrong labels, or rubbish; clip gradients",
            "Katharopoulos and Fleuret 2018, Not All Samples Are Created Equal; "
            "benchmarks/results/diagnosis: planted rubbish",
        )
    )  # fmt: skip


def duplicates(seen: Seen) -> Finding:
    """Share of sequences that equal an earlier one, counted."""
    copies = seen.samples.copies
    again = np.nonzero(copies != np.arange(len(copies)))[0]
    value = len(again) / len(copies)
    return judged(
        Finding(
            "duplicates", "warning", value, 0.0, limits.COPIES, "share of sequences that are copies",
            "sequence " + ", ".join(f"{i} = {copies[i]}" for i in again[:4]) if len(again) else "",
            f"{len(again)} of {plural(len(copies), 'sequence')} are there before, token for token: they count "
            "twice in loss and curvature",
            "take copies out of the data",
            "Lee et al. 2022, Deduplicating Training Data Makes Language Models Better; counted exactly; "
            "benchmarks/results/diagnosis: planted copies",
        )
    )  # fmt: skip


def batch_choice(seen: Seen) -> Finding:
    """Standard deviation of λ_max over disjoint parts of the data, relative to its mean."""
    name, count = "batch_choice", len(seen.parts.top)
    value, error = batch_spread(seen.parts)
    if math.isnan(value):
        return unseen(name, "the data have no two parts with curvature above zero")
    low, high = float(seen.parts.top.min()), float(seen.parts.top.max())
    return judged(
        Finding(
            name, "warning", value, error, limits.BATCH, "spread of λ_max over parts of the data", "",
            f"λ_max goes from {rounded(low, 3)} to {rounded(high, 3)} over {count} disjoint parts: a ceiling from "
            "one batch says little of the next",
            "larger batches, a learning rate with room below the ceiling, clipped gradients",
            "McCandlish et al. 2018, An Empirical Model of Large-Batch Training; "
            "benchmarks/results/diagnosis: planted rubbish",
        )
    )  # fmt: skip
