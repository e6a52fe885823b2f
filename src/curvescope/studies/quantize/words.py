"""What is said about rounding: the numbers to look at first, captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.core.numbers import plural
from curvescope.runs.shown import Line
from curvescope.studies.quantize.correlations import increases, predicted, rows

if TYPE_CHECKING:
    from curvescope.studies.quantize.study import Quantized


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
