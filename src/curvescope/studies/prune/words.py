"""What is said about removals: the numbers to look at first, captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.core.numbers import plural
from curvescope.runs.shown import Line
from curvescope.studies.prune.correlations import rows
from curvescope.studies.prune.surgeons import DENSE, PRODUCTS

if TYPE_CHECKING:
    from curvescope.studies.prune.study import Pruned


def summary(result: Pruned) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    norms = ", ".join(f"{value:.2g} in {name}" for name, value in result.gradient_norm.items())
    found = [
        ("loss", f"{result.loss:.4f}", f"on the data of curvature; {result.held_out_loss:.4f} on others"),
        ("‖g‖", "", f"{norms}: at a minimum it would be zero, and saliencies leave it out"),
    ]
    for name, one in result.minima.items():
        (loss, least), (slope, flat) = one.loss, one.gradient_norm
        words = f"loss of {name} at its minimum, from {loss:.4f}; ‖g‖ {flat:.2g}, from {slope:.2g}, "
        found.append(("minimum", f"{least:.4f}", f"{words}after {plural(one.evaluations, 'gradient')}"))
    shown = {("compensated", "obs"), ("plain", "obd"), ("plain", "both orders")}
    found += [
        (
            f"{row.removed}",
            row.correlation.words,
            f"ρ of {row.predictor} with the measured increase, {row.how}",
        )
        for row in rows(result)
        if (row.how, row.predictor) in shown
    ]
    for name, sets in result.sets.items():
        for j, sparsity in enumerate(sets.sparsities):
            said = ", ".join(
                f"{method} {sets.at(method).interval('held_out', j).value:+.3g}" for method in sets.methods
            )
            found.append(
                (f"{name}, {100 * sparsity:.0f} %", "", f"increase of the loss on other data: {said}")
            )
    return [*found, *(("note", "", note) for note in result.notes)]


def captions(result: Pruned) -> dict[str, str]:
    """What each figure and table shows."""
    ways = {
        DENSE: "with the GGN of the block written out",
        PRODUCTS: "with saliencies of K-FAC's inverse and changes by conjugate gradients with the GGN",
    }
    how = "; ".join(f"{name} {ways[way]}" for name, way in result.how.items())
    sequences = next(iter(result.sets.values())).effects
    known, other = (
        plural(values.shape[1], "sequence") for values in (sequences.measured, sequences.held_out)
    )
    terms = (
        f"Curvature from {known} of {result.data}, other data are {other} more. OBS: δ = −H⁻¹_·Q "
        f"([H⁻¹]_QQ)⁻¹ w_Q with H = GGN + λ I, λ = {result.damping:g} of its mean diagonal; {how}"
    )
    if result.minima:
        terms += "; `at its minimum`: after a descent over the block alone, as far as the first numbers say"
    found = {
        "sets": "Increase of the loss as the least weights of a block go, by method: at once; greedy, one "
        "after the other with one inverse; iterated, with curvature measured anew at each sparsity. "
        "Predicted is gᵀδ + ½ δᵀHδ with the Hessian (dotted), saliencies what the method itself says. "
        "`magnitude + obs` are the smallest weights, made up for. "
        f"{terms}. Intervals are Student's over sequences.",
        "ranks": "Spearman's ρ of predictions with the measured increase, over removals of all blocks, with "
        "95 % intervals by the bootstrap over removals.",
        "samples": "Removals that no method has chosen: single weights at equal steps of their magnitude's "
        f"rank, and groups at random, plain and with the answer of the weights that stay. {terms}.",
    }
    if result.heads:
        found["heads"] = (
            "Whole heads, their rows of W_O at zero, plain and with the answer of the layer's other heads. "
            "Predictions leave out nothing of the second order within W_O; the diagonal of `obd` is "
            "estimated. Residual: of the conjugate gradients."
        )
    return found
