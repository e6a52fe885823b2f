"""What is said about the answers: summary, captions and tables, from what was measured."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from curvescope.papers.ormaniec2025.reviewers.measure import PARTS, Sweep
from curvescope.papers.ormaniec2025.reviewers.questions import (
    architectures,
    depth,
    dropped,
    gradient,
    merged,
    regimes,
    softmax,
)
from curvescope.papers.ormaniec2025.reviewers.setting import DATA
from curvescope.papers.ormaniec2025.reviewers.slopes import ratio_of
from curvescope.runs.shown import Line

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.papers.ormaniec2025.reviewers.study import Reviewers

QUESTIONS = {
    1: depth.QUESTION, 2: dropped.QUESTION, 3: architectures.QUESTION, 4: regimes.QUESTION,
    5: merged.QUESTION, 6: gradient.QUESTION, 7: softmax.QUESTION,
}  # fmt: skip
BASE = (
    "Transformer of one layer: one softmax head, width 4, W_O, ReLU feed-forward of width 5, skips, no norm, "
    "no biases, 152 parameters at initialization"
)


def summary(result: Reviewers) -> list[Line]:
    """How many claims of a question hold, in which way."""
    rows = result.answers()
    found = []
    for number, question in QUESTIONS.items():
        counts = Counter(row.verdict.partition(" with ")[0] for row in rows if row.question == number)
        words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        found.append((f"question {number}", words, question))
    return found


def captions(result: Reviewers) -> dict[str, str]:
    """What is plotted, on which data, with which architecture; for every figure and table."""
    data = DATA.format(sequences=result.settings["sequences"])
    over = f"Means over {result.seeds} seeds of weights and embeddings, with 95 % intervals"
    heads = len(result.of(softmax.Heads)["softmax"].softmax)
    settings = "; ".join(regimes.caption_of(case) for case in regimes.CASES)
    return {
        "reviewers_depth": "Exponents of σ, fitted for σ from 0.0003 to 0.003, of ‖H_o‖ and ‖H‖ of every "
        f"W_Q, W_K and W_V, against the paper's for one layer (lines). {over}. Data: {data}. Networks: the "
        f"{BASE}, changed as the labels say (all see all: σ from 0.01 to 0.04). Dots "
        "of one label are its layers.",
        "reviewers_dropped": "Left: ‖∂ℓ/∂F‖ of a term, the factor that the O-notation drops, against σ: "
        "2(F − Y) under squared error, p − y under cross-entropy. Right: ‖H_f(W_Q)‖ over σ⁵; where "
        "the network fits, at σ = 0.1, both are zero and left out. "
        f"{over}. Data: {data}; under squared error the targets are those digits as one-hot vectors, changed "
        f"as the labels say. Network: the {BASE}.",
        "reviewers_architectures": "Exponents of σ of ‖H‖ of every block of weights, for σ from 0.0003 "
        f"to 0.003. {over}. Data: {data}. Networks: the {BASE}; an MLP and a gated MLP on the last six "
        "tokens, a causal convolutional net, a causal MLP-mixer and a tanh RNN, each of 144 to 161.",
        "reviewers_regimes": "Local slopes d log ‖block‖ / d log σ of H over six decades of σ; where a line "
        "ends the block is zero in float64. Bands are 95 % intervals over "
        f"{result.seeds} seeds. Data: {data}. Networks: {settings}.",
        "reviewers_merged": "Left: −λ_min(H)/λ_max(H_o) over the weights of the scores, with W_Q and W_K and "
        "with their product, against σ (cross-entropy, at initialization). Middle and right: loss of "
        f"whole-batch training at σ = 1 on {merged.SUMS} sums, each way and seed with the best of "
        f"{len(merged.RATES['Adam'])} step sizes. Lines are means over {result.seeds} seeds, bands 95 % "
        f"intervals. Data: {data}. Network: the {BASE.replace('152 parameters', '120 parameters')}, its head "
        "of width 2: W_Q and W_K together have as many entries as W_QK.",
        "reviewers_gradient": "Norms of the blocks of the gradient, of H_o and of H against σ. "
        f"{over}. Data: {data}. Network: the {BASE}.",
        "reviewers_softmax": "‖block‖ of H with softmax over the same without, against the temperature τ of "
        "the scores q kᵀ/(τ√d_K). Left: without softmax the scores are the weights; right: the scores "
        f"divided by the number of tokens seen. Geometric means over {heads} seeds with 95 % "
        "intervals. One causal head of width 4, in closed form, on the tokens of the "
        f"{data.partition(' (')[0]} at σ = 1, squared error against normal targets.",
        "reviewers": "Every answer: the claim, what is expected, what was measured, the number that decides "
        "with its 95 % interval over seeds, and the verdict that follows.",
        "reviewers_norms": "Every norm of every sweep.",
        "reviewers_ranges": "Regimes of σ, seed by seed: ranges whose local slopes are within "
        "0.5 of each other.",
        "reviewers_temperature": "‖block‖ of H with softmax over without: geometric mean and 95 % interval.",
    }


def tables(result: Reviewers) -> dict[str, pd.DataFrame]:
    """One row an answer; one a norm; one a regime; one a block and temperature."""
    import pandas as pd

    columns = ("question", "claim", "expected", "measured", "value", "low", "high", "verdict", "source")
    rows = [{name: getattr(row, name) for name in columns} for row in result.answers()]
    return {
        "reviewers": pd.DataFrame(rows, columns=list(columns)),
        "reviewers_norms": pd.DataFrame(_norms(result)),
        "reviewers_ranges": pd.DataFrame(_ranges(result)),
        "reviewers_temperature": pd.DataFrame(_temperature(result)),
    }


def _norms(result: Reviewers) -> list[dict[str, Any]]:
    return [
        {"sweep": name, "block": block, "part": part, "sigma": sigma, "seed": seed,
         "norm": one.norms[seed, s, p, b], "loss_slope": one.slope[seed, s]}
        for name, one in result.of(Sweep).items()
        for seed in range(len(one.norms))
        for s, sigma in enumerate(one.sigma)
        for p, part in enumerate(PARTS)
        for b, block in enumerate(one.blocks)
    ]  # fmt: skip


def _ranges(result: Reviewers) -> list[dict[str, Any]]:
    return [
        {"setting": case, "part": part, "block": block, "seed": seed, **regime._asdict()}
        for case, part, block in dict.fromkeys(law[:3] for law in regimes.LAWS)
        for seed, own in enumerate(regimes.found_in(result.of(Sweep)[f"regime.{case}"], part, block))
        for regime in own
    ]


def _temperature(result: Reviewers) -> list[dict[str, Any]]:
    one = result.of(softmax.Heads)["softmax"]
    return [
        {"block": block, "temperature": tau, "against": over,
         **ratio_of(one.ratio(block, t, over=over))._asdict()}
        for over in ("linear", "mean")
        for block in softmax.NAMES
        for t, tau in enumerate(one.temperatures)
    ]  # fmt: skip
