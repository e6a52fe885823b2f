"""Tables, claims, figures and captions of the study `quantize`, made from the arrays of its result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.core.numbers import plural
from curvescope.runs.shown import Claim, Line, Origin
from curvescope.studies.common.statistics import Interval, all_above, all_below, below, mean_interval
from curvescope.studies.common.weight_changes import Part
from curvescope.studies.quantize.analysis import (
    INPUTS,
    NEAREST,
    OWN,
    PREDICTORS,
    Roundings,
    better,
    increases,
    predicted,
    relative_error,
    rows,
)
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.quantize.study import Quantized

PARTS: tuple[Part, ...] = ("predicted", "measured", "held_out")


def tables(result: Quantized) -> dict[str, pd.DataFrame]:
    """By name."""
    import pandas as pd

    found = {
        "sensitivity": [*_rows(result.blocks), *_rows({"all": result.together})],
        "ranks": _rank_rows(result),
    }
    if result.exact:
        found["exact"] = _rows(result.exact)
    return {name: pd.DataFrame(values) for name, values in found.items()}


def _rows(parts: dict[str, Roundings]) -> list[dict[str, Any]]:
    """One for every block, number of bits and method."""
    found = []
    for name, one in parts.items():
        for j, bits in enumerate(one.bits):
            for i, method in enumerate(one.methods):
                effects = one.at(method)
                row: dict[str, Any] = {"block": name, "bits": int(bits), "method": method}
                row |= {"error": one.size[i, j], "first_order": effects.first[j].mean()}
                row["second_order"] = effects.second[j].mean()
                for label in PARTS:
                    mean = effects.interval(label, j)
                    row |= {label: mean.value, f"{label}_low": mean.low, f"{label}_high": mean.high}
                found.append(row)
    return found


def _rank_rows(result: Quantized) -> list[dict[str, Any]]:
    return [
        {
            "bits": row.bits,
            "predictor": row.predictor,
            "formula": PREDICTORS[row.predictor],
            "spearman": row.correlation.value,
            "spearman_low": row.correlation.low,
            "spearman_high": row.correlation.high,
            "blocks": row.correlation.count,
        }
        for row in rows(result)
    ]


# ----------------------------------------------------------------------------------------------------- claims

OURS: Origin = ("ours", "ours")
NEAR = 0.2  # of the measured increase
BOTH = "both orders"
FIRST = "first and second order rank the blocks by the measured increase"


def claims(result: Quantized) -> list[Claim]:
    """Predictions first, then methods against each other."""
    bits = [int(b) for b in result.together.bits]
    claims = [_signed(words, found) for words, found in ranked(result).items()]
    errors = {b: relative_error(result, i) for i, b in enumerate(bits)}
    claims.append(_near(errors, len(result.blocks)))
    ways = [
        (
            "weights that are rounded later make up for earlier ones (by inputs)",
            INPUTS,
            NEAREST,
            result.blocks,
        ),
        ("so they do with all blocks rounded together", INPUTS, NEAREST, {"all": result.together}),
        (
            f"the GGN of {', '.join(result.exact)} makes up for more than its inputs do",
            OWN,
            INPUTS,
            result.exact,
        ),
    ]
    for words, one, other, parts in ways:
        if parts:
            claims += _lower(words, list(parts.values()), one, other)
    return claims


def ranked(result: Quantized) -> dict[str, dict[int, Correlation]]:
    """Rank correlations over blocks and differences of two, by what is said about them and by bits."""
    ranks = {(row.bits, row.predictor): row.correlation for row in rows(result)}
    places = {int(b): i for i, b in enumerate(result.together.bits)}
    others = {"the size of the rounding error": "error", "the trace of the GGN times that size": "trace"}
    found = {FIRST: {b: ranks[b, BOTH] for b in places}}
    for words, other in others.items():
        each = {b: better(result, BOTH, other, i) for b, i in places.items()}
        found[f"they rank blocks better than {words} does"] = each
    return found


def _signed(words: str, found: dict[int, Correlation]) -> Claim:
    """It holds if all intervals are above zero, and fails if one is below."""
    published = "ρ > 0" if words == FIRST else "ρ larger"
    measured = ", ".join(f"{one.words} at {b} bits" for b, one in found.items())
    verdict = all_above(found.values())
    return Claim(words, published, measured, verdict, *OURS)


def _near(found: dict[int, Correlation], blocks: int) -> Claim:
    """Of so many blocks, of which those that rounding does not change are left out."""
    words = f"the prediction is within {100 * NEAR:.0f} % of the measured increase, in the median over blocks"
    measured = ", ".join(
        f"{one.value:.2g} [{one.low:.2g}, {one.high:.2g}] at {b} bits"
        + (f" ({blocks - one.count} of {blocks} without any change)" if one.count < blocks else "")
        for b, one in found.items()
    )
    verdict = all_below(found.values(), NEAR)
    return Claim(words, f"at most {NEAR:g}", measured, verdict, *OURS)


def held_out_differences(parts: Iterable[Roundings], one: str, other: str) -> list[Interval]:
    """Loss by one method less that by another, for each number of bits, on other data: means over blocks."""
    pairs = [(part.at(one), part.at(other)) for part in parts]
    found = np.mean([a.held_out - b.held_out for a, b in pairs], axis=0)
    return [mean_interval(values, pairs[0][0].held_shares) for values in found]


def _lower(words: str, parts: list[Roundings], one: str, other: str) -> list[Claim]:
    """A claim for every number of bits: it holds if the loss is lower on other data, by its interval."""
    claims = []
    for bits, found in zip(parts[0].bits, held_out_differences(parts, one, other), strict=True):
        verdict = below(found)
        said = f"difference of losses {found.words}"
        claims.append(Claim(f"{words}, {bits} bits, on other data", "lower loss", said, verdict, *OURS))
    return claims


# ---------------------------------------------------------------------------------------------------- figures

MARKS = {NEAREST: "o", INPUTS: "D"}


def figures(result: Quantized) -> dict[str, Figure]:
    """By name."""
    return {"predictions": _predictions(result), "sensitivity": _sensitivity(result)}


def _predictions(result: Quantized) -> Figure:
    """A panel for every number of bits, a dot for every block and method."""
    import matplotlib.pyplot as plt

    bits = result.together.bits
    figure, axes = plt.subplots(
        1, len(bits), figsize=(3.5 * len(bits), 3.5), layout="constrained", squeeze=False
    )
    for i, (ax, b) in enumerate(zip(axes[0], bits, strict=True)):
        for k, (method, mark) in enumerate(MARKS.items()):
            x, y = predicted(result, "both orders", i, method), increases(result, i, method)
            ax.plot(x, y, mark, ms=4, alpha=0.75, color=PALETTE[k], label=method)
        _scaled(ax)
        ax.set_title(f"{b} bits")
        ax.set_xlabel("predicted, gᵀδ + ½ δᵀHδ")
    axes[0][0].set_ylabel("measured increase of the loss")
    axes[0][0].legend()
    return figure


def _scaled(ax: Axes) -> None:
    """The line where what was predicted came out, and few numbers on the axes."""
    low, high = ax.get_xlim()
    ax.axline((0, 0), slope=1, color="0.5", lw=0.7)
    ax.axhline(0, color="0.85", lw=0.6, zorder=0)
    ax.set_xlim(low, high)
    ax.locator_params(nbins=5)
    ax.ticklabel_format(style="sci", scilimits=(-2, 3), useMathText=True)
    ax.tick_params(labelsize=7)


def _sensitivity(result: Quantized) -> Figure:
    """Measured increases of every block, a row for each number of bits; predicted ones beside them."""
    import matplotlib.pyplot as plt

    names, bits = list(result.blocks), result.together.bits
    figure, axes = plt.subplots(
        len(bits),
        1,
        figsize=(max(0.36 * len(names) + 1.5, 4), 1.9 * len(bits) + 0.6),
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    x = np.arange(len(names))
    for i, (ax, b) in enumerate(zip(axes[:, 0], bits, strict=True)):
        for k, method in enumerate(MARKS):
            found = [one.at(method).interval("measured", i) for one in result.blocks.values()]
            mean = np.array([one.value for one in found])
            ends = np.abs(np.array([[one.low, one.high] for one in found]).T - mean)
            place = x + 0.4 * k - 0.2
            ax.bar(place, mean, 0.38, color=PALETTE[k], label=method)
            ax.errorbar(place, mean, yerr=np.nan_to_num(ends), fmt="none", ecolor="0.45", lw=0.8)
            said = predicted(result, "both orders", i, method)
            label = "predicted" if k == 0 else None
            ax.plot(place, said, "_", ms=8, mew=1.6, color="black", label=label)
        ax.axhline(0, color="0.5", lw=0.6)
        ax.set_ylabel(f"{b} bits")
        ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        ax.tick_params(labelsize=7)
    axes[0, 0].set_title("increase of the loss by one block")
    axes[0, 0].legend(ncols=3)
    axes[-1, 0].set_xticks(x, names, rotation=90, fontsize=7)
    return figure


# --------------------------------------------------------------------------------------------------- captions


def summary(result: Quantized) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    loss = f"on the data of curvature; {result.held_out_loss:.4f} on others"
    found = [("loss", f"{result.loss:.4f}", loss)]
    names, every = list(result.blocks), result.together
    for i, bits in enumerate(every.bits):
        truth, said = increases(result, i), predicted(result, "both orders", i)
        worst = int(truth.argmax())
        words = f"the most of any block, {names[worst]}; predicted {said[worst]:+.3g}"
        found.append((f"{bits} bits", f"{truth[worst]:+.3g}", words))
        together = ", ".join(
            f"{method} {every.at(method).interval('measured', i).value:+.3g}, on other data "
            f"{every.at(method).interval('held_out', i).words}"
            for method in every.methods
        )
        total = f"; predicted {every.at('nearest').predicted[i].mean():+.3g}, blocks alone {truth.sum():+.3g}"
        found.append((f"all at {bits} bits", "", together + total))
    found += [
        (f"{row.bits} bits", row.correlation.words, f"ρ of {row.predictor} with the measured increase")
        for row in rows(result)
    ]
    return [*found, *(("note", "", note) for note in result.notes)]


def captions(result: Quantized) -> dict[str, str]:
    """What each figure and table shows."""
    effects = result.together.effects
    known, other = (plural(values.shape[1], "sequence") for values in (effects.measured, effects.held_out))
    step = {"column": "every output of a block", "tensor": "each block"}[result.steps]
    terms = (
        f"Symmetric grids with a step for {step}, the largest weight at its end. Curvature from {known} of "
        f"{result.data}, other data are {other} more. `nearest`: each weight to the nearest point; `inputs`: "
        "row by row, later rows make up for earlier ones by the second moments of the layer's inputs (GPTQ), "
        f"damped by {result.damping:g} of their mean diagonal"
    )
    ends = "low and high: Student's 95 % interval over sequences, of predictions too"
    found = {
        "sensitivity": f"Increase of the loss with one block rounded, and all of them: predicted, gᵀδ + "
        f"½ δᵀHδ with the Hessian, and measured. {terms}; {ends}. error: ‖δ‖². "
        "In the figure bars are measured, with these intervals in gray, dashes predicted.",
        "ranks": "Spearman's ρ over blocks of predictions with the measured increase, rounded to the nearest "
        "points, with 95 % intervals by the bootstrap over blocks.",
        "predictions": "Predicted against measured increase of the loss, a dot for each block; the line is "
        f"where they are equal. {terms}.",
    }
    if result.exact:
        found["exact"] = (
            "Blocks that make up for rounding by their own GGN, written out and damped likewise (`ggn`), "
            f"beside the other ways. {terms}; {ends}."
        )
    return found
