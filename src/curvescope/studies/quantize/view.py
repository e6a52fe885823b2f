"""Tables, claims, figures and captions of the study `quantize`, made from the arrays of its result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms.estimates.ranks import Correlation
from curvescope.core.number_format import plural
from curvescope.runs.study_result import Claim, Line, Tables
from curvescope.studies.common.statistics import (
    OURS,
    Interval,
    all_above,
    all_below,
    below,
    interval_columns,
    mean_interval,
)
from curvescope.studies.common.weight_changes import Part
from curvescope.studies.quantize.study import (
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
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.studies.quantize.study import Quantized

PARTS: tuple[Part, ...] = ("predicted", "measured", "held_out")


def tables(result: Quantized) -> Tables:
    """Return every table by name."""
    rows_by_name = {
        "sensitivity": [*_rows(result.blocks), *_rows({"all": result.together})],
        "ranks": _rank_rows(result),
    }
    if result.exact:
        rows_by_name["exact"] = _rows(result.exact)
    return rows_by_name


def _rows(parts: dict[str, Roundings]) -> list[dict[str, Any]]:
    """One row for every block, number of bits and method."""
    rows_by_name = []
    for name, one in parts.items():
        for j, bits in enumerate(one.bits):
            for i, method in enumerate(one.methods):
                effects = one.at(method)
                row: dict[str, Any] = {"block": name, "bits": int(bits), "method": method}
                row |= {"error": one.size[i, j], "first_order": effects.first[j].mean()}
                row["second_order"] = effects.second[j].mean()
                for label in PARTS:
                    row |= interval_columns(label, effects.interval(label, j))
                rows_by_name.append(row)
    return rows_by_name


def _rank_rows(result: Quantized) -> list[dict[str, Any]]:
    return [
        {
            "bits": row.bits,
            "predictor": row.predictor,
            "formula": PREDICTORS[row.predictor],
            **interval_columns("spearman", row.correlation),
            "blocks": row.correlation.count,
        }
        for row in rows(result)
    ]


NEAR = 0.2  # relative to the measured increase
BOTH = "both orders"
FIRST = "first and second order together rank the blocks by their measured increase"


def claims(result: Quantized) -> list[Claim]:
    """Return claims on predictions, then claims that compare methods."""
    bits = [int(b) for b in result.together.bits]
    claims = [_signed(words, correlations) for words, correlations in ranked(result).items()]
    errors = {b: relative_error(result, i) for i, b in enumerate(bits)}
    claims.append(_near(errors, len(result.blocks)))
    ways = [
        (
            "adjusting the weights that are rounded later lowers the loss (from the layer's inputs)",
            INPUTS,
            NEAREST,
            result.blocks,
        ),
        ("the same with all blocks rounded together", INPUTS, NEAREST, {"all": result.together}),
        (
            f"adjusting with the GGN of {', '.join(result.exact)} lowers the loss more than with its inputs",
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
    """Return rank correlations over blocks, and differences of two, by claim and number of bits."""
    ranks = {(row.bits, row.predictor): row.correlation for row in rows(result)}
    places = {int(b): i for i, b in enumerate(result.together.bits)}
    others = {"the size of the rounding error": "error", "the trace of the GGN times that size": "trace"}
    rankings = {FIRST: {b: ranks[b, BOTH] for b in places}}
    for words, other in others.items():
        each = {b: better(result, BOTH, other, i) for b, i in places.items()}
        rankings[f"first and second order together rank blocks better than {words}"] = each
    return rankings


def _signed(words: str, correlations: dict[int, Correlation]) -> Claim:
    """Claim that holds if all intervals are above zero, and fails if one is below."""
    published = "ρ > 0" if words == FIRST else "ρ larger"
    measured = ", ".join(f"{correlation.words} at {b} bits" for b, correlation in correlations.items())
    verdict = all_above(correlations.values())
    return Claim(words, published, measured, verdict, *OURS)


def _near(errors: dict[int, Correlation], blocks: int) -> Claim:
    """Claim on the relative error of the prediction; blocks that rounding does not change are left out."""
    words = f"the prediction is within {100 * NEAR:.0f} % of the measured increase for the median block"
    measured = ", ".join(
        f"{error.value:.2g} [{error.low:.2g}, {error.high:.2g}] at {b} bits"
        + (f" ({blocks - error.count} of {blocks} unchanged)" if error.count < blocks else "")
        for b, error in errors.items()
    )
    verdict = all_below(errors.values(), NEAR)
    return Claim(words, f"at most {NEAR:g}", measured, verdict, *OURS)


def held_out_differences(parts: Iterable[Roundings], one: str, other: str) -> list[Interval]:
    """Difference in held-out loss between two methods, for each number of bits: means over blocks."""
    pairs = [(part.at(one), part.at(other)) for part in parts]
    differences = np.mean([a.held_out - b.held_out for a, b in pairs], axis=0)
    return [mean_interval(values, pairs[0][0].held_shares) for values in differences]


def _lower(words: str, parts: list[Roundings], one: str, other: str) -> list[Claim]:
    """One claim per number of bits: the difference on held-out data is below zero."""
    claims = []
    for bits, difference in zip(parts[0].bits, held_out_differences(parts, one, other), strict=True):
        verdict = below(difference)
        measured = f"difference of losses {difference.words}"
        claims.append(
            Claim(f"{words}, {bits} bits, on held-out data", "lower loss", measured, verdict, *OURS)
        )
    return claims


MARKS = {NEAREST: "o", INPUTS: "D"}


def figures(result: Quantized) -> dict[str, Figure]:
    """Return every figure by name."""
    return {"predictions": _predictions(result), "sensitivity": _sensitivity(result)}


def _predictions(result: Quantized) -> Figure:
    """One panel per number of bits, one dot per block and method."""
    bits = result.together.bits
    figure, axes = style.subplots(1, len(bits), figsize=(3.5 * len(bits), 3.5), squeeze=False)
    for i, (ax, b) in enumerate(zip(axes[0], bits, strict=True)):
        for k, (method, mark) in enumerate(MARKS.items()):
            x, y = predicted(result, "both orders", i, method), increases(result, i, method)
            ax.plot(x, y, mark, ms=4, alpha=0.75, color=PALETTE[k], label=method)
        style.line_of_agreement(ax)
        ax.set(title=f"{b} bits", xlabel="predicted: gᵀδ + ½ δᵀHδ")
    axes[0][0].set_ylabel("measured increase of the loss")
    axes[0][0].legend()
    return figure


def _sensitivity(result: Quantized) -> Figure:
    """Measured and predicted increase for every block, one row per number of bits."""
    names, bits = list(result.blocks), result.together.bits
    figure, axes = style.subplots(
        len(bits),
        1,
        figsize=(max(0.36 * len(names) + 1.5, 4), 1.9 * len(bits) + 0.6),
        sharex=True,
        squeeze=False,
    )
    x = np.arange(len(names))
    for i, (ax, b) in enumerate(zip(axes[:, 0], bits, strict=True)):
        for k, method in enumerate(MARKS):
            found = [one.at(method).interval("measured", i) for one in result.blocks.values()]
            mean, low, high = np.array(found).T
            place = x + 0.4 * k - 0.2
            ax.bar(place, mean, 0.38, color=PALETTE[k], label=method)
            ax.errorbar(
                place, mean, yerr=style.error_bars(mean, low, high), fmt="none", ecolor="0.45", lw=0.8
            )
            said = predicted(result, "both orders", i, method)
            label = "predicted" if k == 0 else None
            ax.plot(place, said, "_", ms=8, mew=1.6, color="black", label=label)
        ax.axhline(0, color="0.5", lw=0.6)
        ax.set_ylabel(f"{b} bits")
        ax.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes[0, 0].set_title("increase of the loss when one block is rounded")
    axes[0, 0].legend(ncols=3)
    axes[-1, 0].set_xticks(x, names, rotation=90)
    return figure


def summary(result: Quantized) -> list[Line]:
    """Return the main numbers, each with a label and an explanation."""
    loss = f"on the data of the curvature; {result.held_out_loss:.4f} on held-out data"
    lines = [("loss", f"{result.loss:.4f}", loss)]
    names, every = list(result.blocks), result.together
    for i, bits in enumerate(every.bits):
        truth, predictions = increases(result, i), predicted(result, "both orders", i)
        worst = int(truth.argmax())
        words = f"largest increase of a single block, {names[worst]}; predicted {predictions[worst]:+.3g}"
        lines.append((f"{bits} bits", f"{truth[worst]:+.3g}", words))
        together = ", ".join(
            f"{method} {every.at(method).interval('measured', i).value:+.3g}, on held-out data "
            f"{every.at(method).interval('held_out', i).words}"
            for method in every.methods
        )
        total = (
            f"; predicted {every.at('nearest').predicted[i].mean():+.3g}, "
            f"sum of single blocks {truth.sum():+.3g}"
        )
        lines.append((f"all at {bits} bits", "", together + total))
    lines += [
        (f"{row.bits} bits", row.correlation.words, f"ρ of {row.predictor} with the measured increase")
        for row in rows(result)
    ]
    return [*lines, *(("note", "", note) for note in result.notes)]


def captions(result: Quantized) -> dict[str, str]:
    """Return the caption of each figure and table."""
    effects = result.together.effects
    known, other = (plural(values.shape[1], "sequence") for values in (effects.measured, effects.held_out))
    step = {"column": "every output of a block", "tensor": "each block"}[result.steps]
    terms = (
        f"Symmetric grids with one step for {step}; the largest weight lies at the end of the grid. "
        f"Curvature is measured on {known} of {result.data}; held-out data are {other} more. `nearest` "
        "rounds each weight to the nearest point. `inputs` goes row by row and adjusts later rows by "
        f"the second moments of the layer's inputs (GPTQ), damped by {result.damping:g} of their mean "
        "diagonal"
    )
    ends = "low and high: Student's 95 % interval over sequences, also for predictions"
    captions = {
        "sensitivity": "Increase of the loss when one block or all blocks are rounded: predicted (gᵀδ + ½ "
        f"δᵀHδ with the Hessian) and measured. {terms}. {ends}. error: ‖δ‖². In the figure, bars are "
        "measured, with these intervals in gray; dashes are predicted.",
        "ranks": "Spearman's ρ over blocks between predicted and measured increase, for rounding to the "
        "nearest points, with 95 % bootstrap intervals over blocks.",
        "predictions": "Predicted against measured increase of the loss, one dot per block. On the line "
        f"both are equal. {terms}.",
    }
    if result.exact:
        captions["exact"] = (
            "Blocks rounded with adjustment by their own GGN, written out and damped in the same way "
            f"(`ggn`), next to the other methods. {terms}. {ends}."
        )
    return captions
