"""What is said about the blocks of a model: the numbers to look at first, and captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import LIES_BETWEEN, between, plural, rounded, with_error
from curvescope.core.parts import TITLES
from curvescope.runs.shown import Line
from curvescope.studies.blocks.part import Part
from curvescope.studies.spectrum.words import errors, quadrature
from curvescope.viz.scenes import density

if TYPE_CHECKING:
    from curvescope.studies.blocks.study import Blocks

NAMED = 4  # blocks that a line names
MOST_RANKED = 40  # blocks in the figure of the sharpest


def summary(result: Blocks) -> list[Line]:
    """The numbers to look at first: label, value, words."""
    size = dict(zip(result.names, result.sizes.tolist(), strict=True))
    words = f"{result.loss_name} over {result.num_terms:g} terms of {result.data}"
    rows = [("loss", f"{result.loss:.4f}", words)]
    for operator, part in result.parts.items():
        rows += [*_sharpest(part, TITLES[operator]), *_traces(part, TITLES[operator], size)]
        if part.heterogeneity is not None:
            h = part.heterogeneity
            words = f"bits, mean over the pairs of {plural(len(h.names), 'block')}: 0 is equal spectra, "
            rows.append(("Jensen–Shannon", with_error(h.mean, h.mean_stderr), f"{words}1 no overlap"))
    return [*rows, *(("note", "", note) for note in result.notes)]


def opening(result: Blocks) -> str:
    """Which block is sharpest, by how much, and what that allows."""
    operator, part = next(iter(result.parts.items()))
    order = part.ranking()
    if not order:
        return ""
    values = np.array([part.sharpness(name).largest for name in order])
    median = float(np.median(values))
    where = f"On {result.num_terms:g} terms of {result.data}"
    said = (
        f"{where} {order[0]} is the sharpest block of the {TITLES[operator]}, with λ_max {rounded(values[0])}"
    )
    if median > 0 and len(order) > 2:
        said += f", {rounded(values[0] / median, 2)} times that of the median of {_of_all(result, order)}"
    said += _rivals(part, order)
    if part.whole is not None and part.whole.values[1] > 0:
        top, high = float(part.whole.values[1]), part.whole.high
        said += (
            f". Together they reach {between(top, high)}: on these terms plain gradient descent is stable up "
            f"to a learning rate of 2/λ_max, {between(2 / high, 2 / top, 3)}"
        )
    return f"{said}."


def _of_all(result: Blocks, order: list[str]) -> str:
    """`27 of 69 blocks`, or `69 blocks` where λ_max of all is known."""
    count, known = len(order), len(result.names)
    return f"{count} of {known} blocks" if count < known else plural(count, "block")


def _rivals(part: Part, order: list[str]) -> str:
    """`; P may be sharper (858 to 921)`: blocks whose bound is above what was found of the sharpest."""
    told = {name: part.sharpness(name) for name in order}
    found = [name for name in order[1:] if told[name].high > told[order[0]].largest][:NAMED]
    each = ", ".join(f"{name} ({between(told[name].largest, told[name].high)})" for name in found)
    return f"; {each} may be sharper" if found else ""


def spread(result: Blocks) -> str:
    """From the least sharp block to the sharpest, and how far their spectra lie apart."""
    operator, part = next(iter(result.parts.items()))
    order = part.ranking()
    if len(order) < 2:
        return ""
    values = [part.sharpness(name).largest for name in order]
    said = (
        f"λ_max of {plural(len(order), 'block')} of the {TITLES[operator]} goes from "
        f"{rounded(values[-1], 2)} ({order[-1]}) to {rounded(values[0], 2)} ({order[0]}); its median is "
        f"{rounded(float(np.median(values)), 2)}."
    )
    if part.heterogeneity is None:
        return said
    h = part.heterogeneity
    return (
        f"{said} Spectra of {len(h.names)} of them are {with_error(h.mean, h.mean_stderr)} bits apart in the "
        "mean (Jensen–Shannon: 0 is equal, 1 no overlap)."
    )


def _sharpest(part: Part, title: str) -> list[Line]:
    """Which block is sharpest, the learning rate that it allows, and how different blocks are."""
    order = part.ranking()
    if not order:
        return []
    told = {name: part.sharpness(name) for name in order}
    each = [between(told[name].largest, told[name].high) for name in order]
    then = ", ".join(f"{name} {value}" for name, value in zip(order[1:NAMED], each[1:], strict=False))
    words = f"λ_max {each[0]}" + (f", then {then}" if then else "")
    words += f"; {LIES_BETWEEN}" if " to " in words else ""
    found = [(f"sharpest, {title}", order[0], words)]
    if part.whole is not None and part.whole.values[1] > 0:
        top, high = float(part.whole.values[1]), part.whole.high
        words = (
            "2/λ_max: beyond it gradient descent moves away from a minimum; λ_max of all blocks together is "
            f"{between(top, high)} on these terms, and other or fewer have another ceiling; {order[0]} alone "
            f"allows {told[order[0]].ceiling:.3g}"
        )
        found.append((f"learning rate below, {title}", between(2 / high, 2 / top, 3), words))
    values = np.array([s.largest for s in told.values()])
    median = float(np.median(values))
    if median > 0 and len(values) > 1:
        words = f"times: λ_max of the sharpest of {plural(len(values), 'block')} over that of the median one"
        ratio = values.max() / median
        found.append(
            (f"sharpest over median, {title}", f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}", words)
        )
    return found


def _traces(part: Part, title: str, size: dict[str, int]) -> list[Line]:
    """The trace of all blocks, and how many have one that is noise."""
    names = part.traces.names
    total = f"of {plural(len(names), 'block')} with {sum(size[n] for n in names):,} parameters"
    found = [(f"trace, {title}", with_error(*part.trace), f"{total}; ± is a standard error")]
    noise = [n for n in names if part.is_noise(n)]
    share = float(np.median([part.noise(n) for n in names]))
    if noise:
        named = ", ".join(noise[:NAMED]) + (", …" if len(noise) > NAMED else "")
        words = (
            f"of {plural(len(names), 'block')} have a trace that cannot be told from zero, which its 95 % "
            f"interval includes ({named}); λ_max is measured by itself and has no part in this"
        )
        if share < 1:
            words += f"; the trace of the median block is known to within {100 * share:.0f} %"
        found.append((f"traces within noise, {title}", str(len(noise)), words))
    return found


def _how_many(part: Part) -> str:
    """`every diagonal block`, or how many of them."""
    shown, known = min(MOST_RANKED, len(part.ranking())), len(part.ranking())
    if known < len(part.traces.names):
        return f"{shown} of {plural(len(part.traces.names), 'diagonal block')}"
    return "every diagonal block" if shown == known else f"{shown} of {known} diagonal blocks"


COLUMNS = (
    "λ_max with its residual ‖A v − λ v‖ (±: there is an eigenvalue within that distance), the bound that it "
    "is below 95 times in 100 (high), and 2/λ_max with that bound, the learning rate that the block alone "
    "allows; λ_min likewise, which is above its low 95 times in 100; trace and Frobenius "
    "norm ‖·‖_F with standard errors (±) and 95 % intervals (low, high). "
)
PROBES = (
    "Probes: exact, the block was written out with one product per entry; own, from Lanczos steps and probes "
    "of the block alone; shared, from probes of all blocks at once. Noise: half the interval of the trace "
    "over its size; 1: all of it."
)


def captions(result: Blocks) -> dict[str, str]:
    """What each figure and table shows."""
    first = next(iter(result.parts.values()))
    probes, steps = next((d.nodes.shape for d in first.densities.values() if not d.exact), (0, 0))
    lanczos = f" from {plural(probes, 'probe')} of {plural(steps, 'Lanczos step')}" if probes else ""
    found = {
        "sharpness": f"Largest eigenvalue λ_max of {_how_many(first)}, the sharpest first; bars reach up to "
        "the bound that holds 95 times in 100.",
        "block_map": "Every diagonal block, layers to the right and roles downwards, those of no layer "
        "beside them; rows without a number of the chosen quantity are left out. Colors are logarithmic, on "
        "both sides of zero where there are both signs. Empty: not measured, or not positive.",
        "traces": "Trace of every diagonal block: exact where it was written out, else from own probes or "
        f"from {plural(len(first.traces.samples), 'probe')} that all blocks share (the table tells). "
        "Hatched: the 95 % interval includes zero.",
        "norms": "Frobenius norm of every diagonal block that was asked for.",
        "extremes": "Extreme eigenvalues of diagonal blocks; bars are the residuals.",
        "densities": f"Density of the eigenvalues of diagonal blocks{lanczos}, broadened by a kernel "
        "of the width in each title; the band is a 95 % interval over probes.",
        "heterogeneity": "Jensen–Shannon divergence between the spectra of blocks, in bits: 0 is equal, "
        "1 is no overlap. Both spectra of a pair are broadened alike, by a quarter of the root mean "
        "square eigenvalue of the larger one. In the table: standard error and bias over probes.",
    }
    return found | {operator: f"{TITLES[operator]}: {COLUMNS}{PROBES}" for operator in result.parts}


def density_scene(result: Blocks) -> str:
    """What the scene of densities of blocks shows."""
    found = next(iter(result.parts.values())).densities
    first = next((d for d in found.values() if not d.exact), next(iter(found.values())))
    exact = "; of blocks that were written out all eigenvalues are known" if not first.exact else ""
    what = quadrature(first, "its range over the number of steps")
    return density.caption(f"One diagonal block at a time: {what}", errors(first) + exact)
