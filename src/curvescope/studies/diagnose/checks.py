"""Checks of a diagnosis, which give findings, worst first.

A number is unusual beyond what healthy models have, see docs/diagnose.md.

Each limit lies above the largest value (below the smallest, for `EMBEDDED_LOW` and `LIVE`) over the healthy
models of `benchmarks/diagnosis.py`, calibrating seeds, and the bundled model at its four checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from curvescope.algorithms import Sharpness
from curvescope.algorithms.estimates.intervals import jackknife
from curvescope.core.number_format import plural, rounded, with_error
from curvescope.core.result import Result
from curvescope.studies.diagnose.measurements import BlockEnds, Depth, Heads, Parts, Rows, Samples, Whole

Severity = Literal["fault", "warning", "note", "fine", "not looked at"]
"""Worst first. A note is a number to know or a known phenomenon; a healthy number is not a finding."""
FOUND = ("fault", "warning", "note")
USUAL = "as healthy models have it"


@dataclass(frozen=True)
class Finding(Result):
    """One check: its number with an error, the limit, and what follows.

    A check finds something where the value is beyond the limit by more than its error.
    """

    name: str
    severity: str  # a Severity
    value: float
    error: float  # one standard error, or the bound that its method gives
    limit: float  # the value is unusual beyond this; nan if the check has no limit
    unit: str  # what the value is
    where: str  # block, layer, heads or sequences; "" for all
    meaning: str
    advice: str  # "" if none is needed
    evidence: str  # which experiment of ours, which paper
    below: bool = False  # whether unusual is below the limit, not above

    @property
    def found(self) -> bool:
        """Return True if there is something to say."""
        return self.severity in FOUND

    @property
    def number(self) -> str:
        """The value with its error."""
        return with_error(self.value, self.error)

    @property
    def excess(self) -> tuple[float, float, float]:
        """Value over limit, with value ∓ error over it too: unusual above 1; nan without a limit.

        Where unusual is below the limit it is the limit over the value.
        """
        if not self.limit > 0 or not math.isfinite(self.value):
            return math.nan, math.nan, math.nan
        error = 0.0 if math.isnan(self.error) else self.error
        ends = [max(self.value + sign * error, 0.0) / self.limit for sign in (0, -1, 1)]
        if self.below:
            ends = [1 / max(end, 1e-12) for end in (ends[0], ends[2], ends[1])]
        return ends[0], ends[1], ends[2]


def judged(finding: Finding) -> Finding:
    """The finding, fine where its value is not beyond the limit by more than its error."""
    error = 0.0 if math.isnan(finding.error) else finding.error
    if finding.below:
        beyond = finding.value + error < finding.limit
    else:
        beyond = finding.value - error > finding.limit
    return finding if beyond else replace(finding, severity="fine", meaning=USUAL, advice="")


def unseen(name: str, why: str) -> Finding:
    """A check that does not apply, with the reason."""
    nan = math.nan
    return Finding(name, "not looked at", nan, nan, nan, "", "", why, "", "")


def sort(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first; within a severity, farthest beyond the limit first."""
    order = get_args(Severity)

    def place(finding: Finding) -> tuple[int, float]:
        far = finding.excess[0]
        return order.index(finding.severity), -math.inf if math.isnan(far) else -far

    return sorted(findings, key=place)


# ----------------------------------------------------------------------------------------------------- limits

RATE = 1.0  # learning rate over the ceiling: a theorem for the quadratic, nothing is calibrated
NEGATIVE = 1.0  # −λ_min / λ_max of a model that has learned something
NEGATIVE_FRESH = 3.0  # of one that has not: random weights lie near a saddle
LEARNED = 0.95  # loss over log V, below which a model has learned something
CONDITION = 3.0  # λ_max over the Frobenius norm of the bulk
CONFIDENT = 1.6  # loss over log V
UNEVEN = 1.2  # decades between a layer's curvature and the median layer's
FLAT = 1e-4  # curvature of an entry of a block over that of the median block
GROWTH = 1.0  # of gradients from the first layer to the last, in a post-norm model that is not trained
EMBEDDED_HIGH = 12.0  # stream where the layers begin over what they add to it
EMBEDDED_LOW = 0.01
SHARP = 5.0  # trace of a sequence's GGN over the median sequence's
STEEP = 6.0  # norm of a sequence's gradient over the median sequence's
COPIES = 0.0  # share of sequences that are copies: none of a text is
BATCH = 0.8  # spread of λ_max over parts of the data
LIVE = 0.05  # liveness of a head, below which it is saturated
SATURATED = 0.0  # share of heads
MASS = 0.5  # weight of a head on the first token
WRITTEN = 1e-3  # of what the median head writes
DEAD = 0.0  # share of heads


# ------------------------------------------------------------------------------------------------------- seen


class Seen(NamedTuple):
    """The finished measurements; those that were not requested are None."""

    whole: Whole
    rows: Rows
    parts: Parts
    samples: Samples
    heads: Heads
    depth: Depth
    sharpness: Sharpness
    blocks: BlockEnds | None = None
    learning_rate: float | None = None

    @property
    def top(self) -> float:
        """λ_max of the Hessian."""
        return float(self.whole.lines.ends().top[0])

    @property
    def learned(self) -> bool:
        """Return True if the loss is below that of equal probabilities; False if that is not known."""
        return self.whole.loss < LEARNED * self.whole.uniform

    @property
    def spread(self) -> float:
        """Relative standard error of λ_max over other data; without one, its spread over K parts / √K."""
        if self.parts.sampled is not None and not math.isnan(self.parts.sampled.sampling):
            return self.parts.sampled.sampling / self.parts.sampled.value
        return batch_spread(self.parts)[0] / math.sqrt(max(len(self.parts.top), 1))


def batch_spread(parts: Parts) -> tuple[float, float]:
    """Standard deviation of λ_max over K parts, relative to its mean, and the standard error of that.

    For normal values the error is 1/√(2 (K − 1)) of it.
    """
    count, mean = len(parts.top), float(parts.top.mean())
    if count < 2 or not mean > 0:
        return math.nan, math.nan
    value = float(parts.top.std(ddof=1)) / mean
    return value, value / math.sqrt(2 * (count - 1))


def by_layer(names: list[str], values: np.ndarray) -> dict[int, np.ndarray]:
    """Sums of columns (…, B) over the weight matrices of each layer."""
    by_number: dict[int, np.ndarray] = {}
    for i, name in enumerate(names):
        front, _, role = name.partition(".")
        if front[:1] == "L" and front[1:].isdigit() and role.rpartition(".")[2].startswith("W_"):
            by_number[int(front[1:])] = by_number.get(int(front[1:]), 0.0) + values[..., i]
    return dict(sorted(by_number.items()))


# -------------------------------------------------------------------------------------------------- attention


def saturated_attention(seen: Seen) -> Finding:
    """Share of heads whose liveness, mean over sequences, is below a limit; error: those within theirs."""
    name, live = "saturated_attention", seen.heads.liveness
    if seen.heads.why_patterns:
        return unseen(name, seen.heads.why_patterns)
    mean = live.mean(0)
    stderr = live.std(0, ddof=1) / math.sqrt(len(live)) if len(live) > 1 else np.zeros_like(mean)
    stuck = mean + stderr < LIVE
    doubtful = np.abs(mean - LIVE) <= stderr
    share = float(stuck.mean())
    return judged(
        Finding(
            name=name,
            severity="fault",
            value=share,
            error=float(doubtful.mean()) if not stuck.any() else 0.0,
            limit=SATURATED,
            unit=f"share of heads with a liveness below {LIVE:g}",
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
    many = mean > MASS
    return judged(
        Finding(
            name=name,
            severity="note",
            value=value,
            error=error,
            limit=MASS,
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
    dead = heads.written <= WRITTEN * heads.written.max()
    change = np.nanmax(np.abs(heads.change[dead])) if dead.any() else 0.0
    return judged(
        Finding(
            name=name,
            severity="fault",
            value=float(dead.mean()),
            error=0.0,
            limit=DEAD,
            unit=f"share of heads that write below {WRITTEN:g} of the largest",
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
    names = [f"L{i}.h{j}" for i, j in zip(*np.nonzero(chosen), strict=True)]
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")


# ------------------------------------------------------------------------------------------------------- data

FEW = 4  # sequences: too few to call one of them unusual


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
    sharp = samples.numbers[samples.traces > SHARP * middle]
    return judged(
        Finding(
            name=name,
            severity="warning",
            value=value,
            error=error,
            limit=SHARP,
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
    at, steep = int(norms.argmax()), samples.numbers[norms > STEEP * middle]
    value = float(norms[at]) / middle
    return judged(
        Finding(
            name=name,
            severity="warning",
            value=value,
            error=0.0,
            limit=STEEP,
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
            limit=COPIES,
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
            limit=BATCH,
            unit="spread of λ_max over parts of the data",
            where="",
            meaning=f"λ_max goes from {rounded(low, 3)} to {rounded(high, 3)} over {count} disjoint parts: a "
            "ceiling "
            "from one batch says little of the next",
            advice="larger batches, a learning rate well below the ceiling, clipped gradients",
            evidence="McCandlish et al. 2018, An Empirical Model of Large-Batch Training; "
            "benchmarks/results/diagnosis: planted rubbish",
        )
    )


# ----------------------------------------------------------------------------------------------------- layers

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
            limit=UNEVEN,
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
    flat = [rows.names[chosen[i]] for i in np.nonzero(ratio < FLAT)[0]]
    at = int(ratio.argmin())
    spread = np.sqrt(squares[:, at]).std(ddof=1) if len(squares) > 1 else math.nan
    error = float(spread / math.sqrt(len(squares)) / np.median(per_entry))
    return judged(
        Finding(
            name=name,
            severity="fault",
            value=float(ratio[at]),
            error=error,
            limit=FLAT,
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
    finding = Finding(
        name=name,
        severity="warning",
        value=value,
        error=error,
        limit=GROWTH if depth.norm == "post" and not seen.learned else math.nan,
        unit="gradient of the last layer over the first's",
        where="",
        meaning=f"post-norm, not trained yet, and gradients grow {rounded(value, 3)} times from the first "
        "layer to "
        "the last: the first steps move the last layers most",
        advice="warm the learning rate up, or put norms before attention and feed-forward",
        evidence="Xiong et al. 2020, On Layer Normalization in the Transformer Architecture; "
        "benchmarks/results/diagnosis: planted post_norm",
    )
    decided = judged(finding)
    if decided.found or math.isnan(finding.limit):
        return decided
    return replace(finding, severity="note", meaning=UNDECIDED.format(rounded(value, 3)), advice="")


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
            limit=EMBEDDED_LOW if low else EMBEDDED_HIGH,
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


# --------------------------------------------------------------------------------------------------- spectrum

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
            limit=NEGATIVE if seen.learned else NEGATIVE_FRESH,
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
            limit=CONDITION,
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
        return unseen(name, "the loss is not a cross-entropy over classes")
    losses = seen.samples.losses
    error = float(losses.std(ddof=1) / math.sqrt(len(losses))) / uniform if len(losses) > 1 else math.nan
    return judged(
        Finding(
            name=name,
            severity="warning",
            value=loss / uniform,
            error=error,
            limit=CONFIDENT,
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


# ------------------------------------------------------------------------------------------------------ steps

EDGE = "Cohen et al. 2021, Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability"
ADAM = "Cohen et al. 2022, Adaptive Gradient Methods at the Edge of Stability"
OURS = "benchmarks/results/diagnosis: planted rate"


def learning_rate(seen: Seen) -> Finding:
    """The largest stable learning rate, and the given one over it.

    The error is one standard error from the residual of λ_max (numerical) and other data (sampling).
    """
    name, s = "learning_rate", seen.sharpness
    ceiling, rate = s.max_learning_rate, _given(seen)
    if not math.isfinite(ceiling):
        return unseen(name, f"λ_max is {s.value:.3g}: no curvature above zero limits a step")
    relative = math.hypot(s.residual / s.value, 0.0 if math.isnan(seen.spread) else seen.spread)
    number = seen.parts.sampled
    sentence = f"{s.optimizer} is stable up to {s.formula} = {rounded(ceiling, 3)} on these data"
    if number is not None and not number.settled():
        sentence += f" (λ_max is {number.headline}, {number.verdict()})"
    finding = Finding(
        name=name,
        severity="note",
        value=ceiling,
        error=ceiling * relative,
        limit=math.nan,
        unit="ceiling",
        where="",
        meaning=f"{sentence}; other or fewer data have another ceiling",
        advice="",
        evidence=f"{ADAM if 'Adam' in s.optimizer else EDGE}; {OURS}",
    )
    return finding if rate is None else _against(finding, rate, sentence)


def _against(ceiling: Finding, rate: float, sentence: str) -> Finding:
    """A given rate over the ceiling: a fault beyond 1 by more than the error, a note within it, else fine."""
    ratio = rate / ceiling.value
    error = ratio * ceiling.error / ceiling.value
    sentence = f"{sentence}; {rate:g} is {rounded(ratio, 3)} of it"
    safe = below(ceiling.value**2 / (ceiling.value + ceiling.error))
    if ratio - error > RATE:
        severity, meaning = "fault", f"{sentence}: steps along the sharpest direction grow"
        advice = f"take at most {safe}, or warm up to it while λ_max falls"
    elif ratio + error > RATE:
        severity, meaning = "note", f"{sentence}, and the error leaves open whether that is too much"
        advice = f"{safe} is below the ceiling by more than its error; more data would make the error smaller"
    else:
        severity, meaning, advice = "fine", sentence, ""
    compared = replace(ceiling, value=ratio, error=error, limit=RATE, unit="given over ceiling")
    return replace(compared, severity=severity, meaning=meaning, advice=advice)


def below(rate: float) -> str:
    """Two digits of a rate, rounded down, so that the stated rate is not above it."""
    place = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return rounded(math.floor(rate / place) * place, 2)


def block_learning_rate(seen: Seen) -> Finding:
    """The matrix whose own ceiling is lowest; whether the given rate is above that of some.

    The ceiling is c/λ_max of the block with the c of gradient descent, 2, or of its momentum.
    """
    name, blocks, s = "block_learning_rate", seen.blocks, seen.sharpness
    if blocks is None or not len(blocks.names):
        return unseen(
            name, "λ_max of single matrices is left out of this run; --set block_steps=8 takes it in"
        )
    i = int(blocks.top.argmax())
    top, sampling = float(blocks.top[i]), 0.0 if math.isnan(seen.spread) else seen.spread
    error = math.hypot(float(blocks.error[i]), top * sampling)  # the sampling error of all blocks together
    if top <= 0:
        return unseen(name, "no block has curvature above zero")
    most = block_threshold(s)
    rate, ceiling = _given(seen), most / top
    how = "gradient descent 2/λ_max" if "Adam" in s.optimizer else f"{s.optimizer} {s.formula}"
    meaning = f"{blocks.names[i]} alone allows {how} = {rounded(ceiling, 3)}"
    evidence = f"{EDGE}; {OURS}"
    if rate is None or "Adam" in s.optimizer:
        return Finding(
            name=name,
            severity="note",
            value=ceiling,
            error=ceiling * error / top,
            limit=math.nan,
            unit="ceiling",
            where=blocks.names[i],
            meaning=meaning,
            advice="",
            evidence=evidence,
        )
    ends = zip(blocks.names, blocks.top, blocks.error, strict=True)
    over = [n for n, t, e in ends if rate * (t - math.hypot(e, t * sampling)) > most]
    ratio = rate / ceiling
    meaning += f"; the given rate is above the ceiling of {plural(len(over), 'block')}" if over else ""
    advice = f"a rate of their own for {', '.join(over[:4])}, or the lower one for all" if over else ""
    return Finding(
        name=name,
        severity="fault" if over else "fine",
        value=ratio,
        error=ratio * error / top,
        limit=RATE,
        unit="given over ceiling",
        where=", ".join(over[:4]) or blocks.names[i],
        meaning=meaning,
        advice=advice,
        evidence=evidence,
    )


def block_threshold(s: Sharpness) -> float:
    """c of η λ_max < c for a block alone: that of SGD with its momentum, and of plain descent beside Adam."""
    known = "Adam" not in s.optimizer and s.value > 0
    return s.max_learning_rate * s.value if known else 2.0


def _given(seen: Seen) -> float | None:
    """The learning rate that was said, else that of a saved state."""
    if seen.learning_rate is not None:
        return seen.learning_rate
    return None if math.isnan(seen.sharpness.learning_rate) else seen.sharpness.learning_rate


# -------------------------------------------------------------------------------------------------------- all

CHECKS: dict[str, Callable[[Seen], Finding]] = {
    "learning_rate": learning_rate,
    "block_learning_rate": block_learning_rate,
    "negative_curvature": negative_curvature,
    "condition": condition,
    "confidence": confidence,
    "uneven_layers": uneven_layers,
    "flat_blocks": flat_blocks,
    "norm_placement": norm_placement,
    "embedding_scale": embedding_scale,
    "sharp_sequences": sharp_sequences,
    "steep_sequences": steep_sequences,
    "duplicates": duplicates,
    "batch_choice": batch_choice,
    "saturated_attention": saturated_attention,
    "sinks": sinks,
    "dead_heads": dead_heads,
}


def look(seen: Seen) -> list[Finding]:
    """Findings of all checks, worst first."""
    return sort(check(seen) for check in CHECKS.values())
