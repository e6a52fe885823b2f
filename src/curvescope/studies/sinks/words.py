"""What is said about sinks: the numbers to look at first, captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import plural, with_error
from curvescope.runs.shown import Line
from curvescope.studies.sinks.effects import Quantity, effect, ends, split
from curvescope.studies.sinks.tables import probe_error
from curvescope.studies.sinks.ways import HOWS, UNCHANGED

if TYPE_CHECKING:
    from curvescope.studies.sinks.study import Sinks


def summary(result: Sinks) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    one = result.moved[UNCHANGED]
    terms = f"{sum(result.num_terms):g} terms of {result.data} in {plural(len(one.loss), 'text')}"
    found = [("loss", f"{one.loss.mean():.4f}", f"{result.loss_name}, {terms}")]
    found += _strongest(result)
    h, bulk = ends(result, UNCHANGED), split(result, UNCHANGED)
    stderr = probe_error(bulk.width)
    found += [
        (
            "λ_max",
            with_error(float(h.top.mean()), float(h.top_error.mean())),
            "of H, mean over texts; ± residual",
        ),
        (
            "bulk width",
            with_error(float(bulk.width.mean()), stderr),
            f"{bulk.outliers.mean():.0f} outliers beyond a soft threshold of {result.threshold:g} of the "
            "largest |λ|; ± standard error over probes",
        ),
    ]
    found += [_moved(result, way.how, way.name, way.strength) for way in result.last()]
    return [*found, *(("note", "", note) for note in result.notes)]


def opening(result: Sinks) -> str:
    """Where the strongest sink is, and what growing one does to the largest eigenvalue."""
    strongest = _strongest(result)
    said = f"{strongest[0][1]} {strongest[0][2]}." if strongest else ""
    effects = {way: effect(result, way.name, "lambda_max") for way in result.last()}
    sure = {way: found for way, found in effects.items() if found.direction}
    if not effects:
        return said
    if not sure:
        return f"{said} No way of growing a sink moves λ_max beyond its error.".strip()
    way = max(sure, key=lambda one: abs(np.log(sure[one].mean)))
    moved = f"multiplies λ_max by {sure[way].mean:.2f} ({sure[way].low:.2f} to {sure[way].high:.2f})"
    return f"{said} Of {plural(len(effects), 'way')} to grow one, {way.how} {way.strength:g} {moved}.".strip()


def _strongest(result: Sinks) -> list[Line]:
    heads = result.heads
    if not heads.mass.size:
        return []
    i, j = np.unravel_index(int(heads.mass.argmax()), heads.mass.shape)
    words = f"of the weight of L{i}.h{j} goes to the first token, the most of any head; "
    words += f"{100 * heads.mass.mean():.0f} % over all heads"
    found = [("strongest sink", f"{100 * heads.mass[i, j]:.0f} %", words)]
    if heads.massive.size:
        n = int(heads.massive.argmax())
        words = f"largest over median |x| of the stream at the first token, {heads.points[n]}; "
        words += f"{heads.massive_others[n]:.1f} at others"
        found.append(("massive activation", f"{heads.massive[n]:.1f}", words))
    return found


def _moved(result: Sinks, how: str, name: str, strength: float) -> Line:
    """What a way does at its last strength."""

    def said(quantity: Quantity, label: str) -> str:
        found = effect(result, name, quantity)
        sure = "" if found.direction else ", not sure"
        return f"{label} × {found.mean:.2f} ({found.low:.2f} to {found.high:.2f}{sure})"

    mass = result.moved[name].mass.mean()
    reached = "" if np.isnan(mass) else f"sink mass {mass:.2f}; "
    return (
        f"{how} {strength:g}",
        f"× {effect(result, name, 'lambda_max').mean:.2f}",
        f"λ_max; {HOWS[how]}: {reached}{said('lambda_max', 'λ_max')}, {said('bulk_width', 'bulk width')}",
    )


def captions(result: Sinks) -> dict[str, str]:
    """What each figure and table shows."""
    one = result.moved[UNCHANGED]
    texts = plural(len(one.loss), "text")
    probes, steps = one.hessian.alpha.shape[1:]
    bulk = (
        f"Outliers are counted softly, by x⁴/(1 + x⁴) of x = λ/τ with τ = {result.threshold:g} of the "
        "largest |λ| of the unchanged model on the same text; the bulk width is the root mean square of the "
        "other eigenvalues"
    )
    how = f"From {plural(probes, 'probe')} with {steps} Lanczos steps on each of {texts}, paired over ways"
    factors = (
        "Factors are against the unchanged model on the same text and with the same probes; low and high are "
        "a 95 % interval over texts; a direction of 1 or −1 is sure: that interval leaves out one, or every "
        "text moved to this side beyond its error (residuals of eigenvalues; of the bulk the 95 % interval "
        "over probes and what the last steps moved); 0, `not sure` in the first numbers, is neither"
    )
    return {
        "sinks": f"The spectrum as a sink grows. {how}. {bulk}. λ_max and λ_min: an eigenvalue lies within "
        "the error. Sink mass: weight that goes to no token behind the first (behind the inserted ones), "
        f"before a gate. {factors}.",
        "texts": f"The same, text by text. {factors}.",
        "spectra": f"Factors on λ_max (GGN dashed), bulk width and number of outliers as a sink grows, one "
        f"column for each way. {how}. {bulk}. Dots are texts with their errors, lines "
        "geometric means; a move is sure where all dots lie beyond their errors on one side of one, or the "
        "interval over texts leaves out one.",
        "heads": "Mean weight on the first token over later queries and sequences, its standard deviation "
        "over sequences, and the norm of the first token's value over the mean norm of the others'.",
        "stream": "Massive activations: largest over median |x| in the residual stream, at the first token "
        "and at others, where it enters and behind each layer.",
        "blocks": "λ_max of groups of diagonal blocks on the first text, unchanged and at the last strength "
        "of each way, and as a factor; an eigenvalue lies within the error.",
    }
