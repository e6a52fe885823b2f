"""Heads: stuck on single keys, resting on the first token, or writing nothing."""

from __future__ import annotations

import math

import numpy as np

from curvescope.core.numbers import plural, rounded
from curvescope.studies.diagnose.checks import limits
from curvescope.studies.diagnose.checks.seen import Seen
from curvescope.studies.diagnose.finding import Finding, judged, unseen


def saturated_attention(seen: Seen) -> Finding:
    """Share of heads whose liveness, mean over sequences, is below a limit; error: those within theirs."""
    name, live = "saturated_attention", seen.heads.liveness
    if seen.heads.why_patterns:
        return unseen(name, seen.heads.why_patterns)
    mean = live.mean(0)
    stderr = live.std(0, ddof=1) / math.sqrt(len(live)) if len(live) > 1 else np.zeros_like(mean)
    stuck = mean + stderr < limits.LIVE
    doubtful = np.abs(mean - limits.LIVE) <= stderr
    share = float(stuck.mean())
    return judged(
        Finding(
            name=name,
            severity="fault",
            value=share,
            error=float(doubtful.mean()) if not stuck.any() else 0.0,
            limit=limits.SATURATED,
            unit=f"share of heads with a liveness below {limits.LIVE:g}",
            where=_heads(stuck),
            meaning=f"{plural(int(stuck.sum()), 'head')} of {stuck.size} look at single keys alone (least "
            "liveness "
            f"{rounded(float(mean.min()), 2)}): their softmax passes hardly any gradient to queries and keys",
            advice="smaller weights of queries and keys, a norm on them, or a lower learning rate for them",
            evidence="Zhai et al. 2023, Stabilizing Transformer Training by Preventing Attention Entropy "
            "Collapse; "
            "benchmarks/results/diagnosis: planted saturated",
        )
    )


def sinks(seen: Seen) -> Finding:
    """The largest weight of a head on the first token, mean over queries and sequences."""
    name, mass = "sinks", seen.heads.mass
    if seen.heads.why_patterns:
        return unseen(name, seen.heads.why_patterns)
    mean = mass.mean(0)
    at = np.unravel_index(int(mean.argmax()), mean.shape)
    value = float(mean[at])
    error = float(mass[:, at[0], at[1]].std(ddof=1) / math.sqrt(len(mass))) if len(mass) > 1 else math.nan
    many = mean > limits.MASS
    return judged(
        Finding(
            name=name,
            severity="note",
            value=value,
            error=error,
            limit=limits.MASS,
            unit="weight on the first token",
            where=_heads(many),
            meaning=f"{plural(int(many.sum()), 'head')} of {many.size} rest on the first token: known of "
            "trained "
            "language models, and no fault by itself",
            advice="keep the first tokens in a cache that is cut; `curvescope run sinks` shows what the "
            "spectrum owes to them",
            evidence="Xiao et al. 2024, Efficient Streaming Language Models with Attention Sinks; our study "
            "`sinks` "
            "(benchmarks/results/sinks-gpt2); benchmarks/results/diagnosis: planted sink",
        )
    )


def dead_heads(seen: Seen) -> Finding:
    """Share of heads that write less than a limit, of what the largest head writes."""
    name, heads = "dead_heads", seen.heads
    if heads.why_written:
        return unseen(name, heads.why_written)
    dead = heads.written <= limits.WRITTEN * heads.written.max()
    change = np.nanmax(np.abs(heads.change[dead])) if dead.any() else 0.0
    return judged(
        Finding(
            name=name,
            severity="fault",
            value=float(dead.mean()),
            error=0.0,
            limit=limits.DEAD,
            unit=f"share of heads that write below {limits.WRITTEN:g} of the largest",
            where=_heads(dead),
            meaning=f"{plural(int(dead.sum()), 'head')} of {dead.size} write nothing into the stream; "
            "without them the "
            f"loss changes by {change:.1g}",
            advice="take them out, or give their W_O and W_V new weights",
            evidence="Michel, Levy and Neubig 2019, Are Sixteen Heads Really Better than One?; ablated here; "
            "benchmarks/results/diagnosis: planted dead_head",
        )
    )


def _heads(chosen: np.ndarray) -> str:
    """`L0.h1, L2.h3, …`."""
    found = [f"L{i}.h{j}" for i, j in zip(*np.nonzero(chosen), strict=True)]
    return ", ".join(found[:6]) + (", …" if len(found) > 6 else "")
