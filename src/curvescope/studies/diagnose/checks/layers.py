"""Layers beside each other: one unlike the others, flat blocks, growth with depth, the embedding."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from curvescope.algorithms.estimates.jackknife import jackknife
from curvescope.core.numbers import plural, rounded
from curvescope.studies.diagnose.checks import limits
from curvescope.studies.diagnose.checks.seen import Seen, by_layer
from curvescope.studies.diagnose.finding import Finding, judged, unseen

UNDECIDED = (
    "post-norm, not trained yet: such stacks are known to need a warm-up; here gradients grow {} times from "
    "the first layer to the last, which does not decide it"
)


def uneven_layers(seen: Seen) -> Finding:
    """max over layers of |log₁₀ R_ℓ / median R|, R_ℓ the norm ‖H_ℓ:‖ of the rows of a layer's matrices."""
    name, squares = "uneven_layers", by_layer(seen.rows.names, seen.rows.squares)
    if len(squares) < 2:
        return unseen(name, "the model has fewer than two layers that are known")
    samples = np.stack(list(squares.values()))  # (L, P)
    if not (samples.sum(1) > 0).all():
        return unseen(name, "a layer has no curvature at all, see flat_blocks")
    far = _decades(samples.sum(1))
    at = int(np.abs(far).argmax())
    without = [_decades(np.delete(samples, i, axis=1).sum(1))[at] for i in range(samples.shape[1])]
    value, error = abs(float(far[at])), float(jackknife(float(far[at]), np.array(without))[0])
    layer = f"L{list(squares)[at]}"
    return judged(
        Finding(
            name=name,
            severity="warning",
            value=value,
            error=error,
            limit=limits.UNEVEN,
            unit="decades from the median layer",
            where=layer,
            meaning=f"the curvature of {layer} is {rounded(10 ** abs(float(far[at])), 3)} times "
            f"{'above' if far[at] > 0 else 'below'} that of the median layer: no one learning rate fits both",
            advice=f"look at the scale of the weights of {layer}, and of those around it",
            evidence="Zhang et al. 2024, Why Transformers Need Adam: A Hessian Perspective; "
            "benchmarks/results/diagnosis: planted layer",
        )
    )


def _decades(squares: np.ndarray) -> np.ndarray:
    """log₁₀ of norms over their median, from squared norms."""
    logs = 0.5 * np.log10(squares)
    return logs - np.median(logs)


def flat_blocks(seen: Seen) -> Finding:
    """The least curvature of an entry, ‖H_b:‖/√n_b over weight matrices b, over that of the median one."""
    name, rows = "flat_blocks", seen.rows
    chosen = [i for i, n in enumerate(rows.names) if n.rpartition(".")[2].startswith("W_")]
    if len(chosen) < 2:
        return unseen(name, "the model has fewer than two weight matrices that are known")
    squares = rows.squares[:, chosen] / rows.sizes[chosen]
    per_entry = np.sqrt(squares.mean(0))
    ratio = per_entry / np.median(per_entry)
    flat = [rows.names[chosen[i]] for i in np.nonzero(ratio < limits.FLAT)[0]]
    at = int(ratio.argmin())
    spread = np.sqrt(squares[:, at]).std(ddof=1) if len(squares) > 1 else math.nan
    error = float(spread / math.sqrt(len(squares)) / np.median(per_entry))
    return judged(
        Finding(
            name=name,
            severity="fault",
            value=float(ratio[at]),
            error=error,
            limit=limits.FLAT,
            unit="of an entry, over the median block",
            where=", ".join(flat[:6]) or rows.names[chosen[at]],
            meaning=f"{plural(len(flat), 'block')} without curvature: the loss does not depend on "
            f"{'it' if len(flat) == 1 else 'them'}, here or nearby",
            advice="look for units that are off for all inputs, or outputs that are multiplied by zero",
            evidence="benchmarks/results/diagnosis: planted feed_forward",
            below=True,
        )
    )


def norm_placement(seen: Seen) -> Finding:
    """Growth of ‖∇L‖ from the first layer to the last, by the slope of its logarithm; without W_Q and W_K."""
    name, parts, depth = "norm_placement", seen.parts, seen.depth
    if len(parts.gradient) < 3 or not (parts.gradient > 0).all():
        return unseen(name, "the model has fewer than three layers with a gradient that are known")
    if depth.norm not in ("pre", "post"):
        return unseen(name, "where the norms of the model stand is not known, or it has none")
    value = _growth(parts.gradient)
    several = len(parts.without) > 1 and bool((parts.without > 0).all())
    without = [_growth(row) for row in parts.without] if several else [value]
    error = float(jackknife(value, np.array(without))[0])
    found = Finding(
        name=name,
        severity="warning",
        value=value,
        error=error,
        limit=limits.GROWTH if depth.norm == "post" and not seen.learned else math.nan,
        unit="gradient of the last layer over the first's",
        where="",
        meaning=f"post-norm, not trained yet, and gradients grow {rounded(value, 3)} times from the first "
        "layer to "
        "the last: the first steps move the last layers most",
        advice="warm the learning rate up, or put norms before attention and feed-forward",
        evidence="Xiong et al. 2020, On Layer Normalization in the Transformer Architecture; "
        "benchmarks/results/diagnosis: planted post_norm",
    )
    decided = judged(found)
    if decided.found or math.isnan(found.limit):
        return decided
    return replace(found, severity="note", meaning=UNDECIDED.format(rounded(value, 3)), advice="")


def _growth(squares: np.ndarray) -> float:
    """exp((L − 1) b), b the least-squares slope of log norms over layers."""
    x, y = np.arange(len(squares)), 0.5 * np.log(squares)
    return float(np.exp(np.polyfit(x, y, 1)[0] * (len(squares) - 1)))


def embedding_scale(seen: Seen) -> Finding:
    """Size of the stream where layers begin, over the size of what they add to it."""
    name, depth = "embedding_scale", seen.depth
    if depth.why:
        return unseen(name, depth.why)
    if depth.norm == "post":
        return unseen(name, "post-norm: the stream is normalized behind every sublayer, whatever its scale")
    ratios = depth.embedded / depth.added
    value = float(np.median(ratios))
    error = float(ratios.std(ddof=1) / math.sqrt(len(ratios))) if len(ratios) > 1 else math.nan
    low = value < 1
    words = "hardly see each other's" if not low else "drown"
    return judged(
        Finding(
            name=name,
            severity="warning",
            value=value,
            error=error,
            limit=limits.EMBEDDED_LOW if low else limits.EMBEDDED_HIGH,
            unit="embedding over what layers add",
            where="",
            meaning=f"the stream begins {rounded(value, 3)} times as large as all that the layers add: "
            + (f"layers {words} changes" if not low else f"what layers write makes the embedding {words}"),
            advice="another scale of the embedding, or a norm behind it",
            evidence="Takase et al. 2023, Spike No More: Stabilizing the Pre-training of Large Language "
            "Models; "
            "benchmarks/results/diagnosis: planted embedding",
            below=low,
        )
    )
