"""What is said about the blocks of a model: the numbers to look at first, and captions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import plural, with_error
from curvescope.core.parts import TITLES
from curvescope.runs.shown import Line
from curvescope.studies.blocks.part import Part

if TYPE_CHECKING:
    from curvescope.studies.blocks.study import Blocks

NAMED = 4  # blocks that a line names


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


def _sharpest(part: Part, title: str) -> list[Line]:
    """Which block is sharpest, the learning rate that it allows, and how different blocks are."""
    order = part.ranking()
    if not order:
        return []
    told = {name: part.sharpness(name) for name in order}
    each = [with_error(told[name].largest, told[name].error) for name in order]
    then = ", ".join(f"{name} {value}" for name, value in zip(order[1:NAMED], each[1:], strict=False))
    words = f"λ_max {each[0]}" + (f", then {then}" if then else "")
    words += "; ± holds an eigenvalue" if "±" in words else ""
    found = [(f"sharpest, {title}", order[0], words)]
    if part.whole is not None and part.whole.values[1] > 0:
        top, error = float(part.whole.values[1]), float(part.whole.residuals[1])
        words = (
            "2/λ_max: beyond it gradient descent moves away from a minimum. λ_max of all blocks together is "
            f"{with_error(top, error)}, at most {part.whole.high:,.6g} 95 times in 100; "
        )
        alone = f"{order[0]} alone allows {2 / told[order[0]].largest:.3g}"
        found.append((f"learning rate below, {title}", f"{2 / top:.3g}", words + alone))
    values = np.array([s.largest for s in told.values()])
    median = float(np.median(values))
    if median > 0 and len(values) > 1:
        words = f"times: λ_max of the sharpest of {plural(len(values), 'block')} over that of the median one"
        ratio = values.max() / median
        found.append((f"heterogeneity, {title}", f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}", words))
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
            f"of {plural(len(names), 'block')}: the 95 % interval of their trace includes zero ({named}); "
        )
        found.append(("within noise", str(len(noise)), f"{words}of the median block ± {100 * share:.2g} %"))
    return found


COLUMNS = (
    "λ max with its residual ‖A v − λ v‖ (±: there is an eigenvalue within that distance), the bound that it "
    "is below 95 times in 100 (high), and 2/λ max, the learning rate that the block alone allows; trace and "
    "Frobenius norm ‖·‖ F with standard errors (±) and 95 % intervals (low, high). "
)
PROBES = (
    "Probes: exact, the block was written out with one product per entry; own, from Lanczos steps and probes "
    "of the block alone; shared, from probes of all blocks at once. Noise: half the interval of the trace "
    "over its size."
)


def captions(result: Blocks) -> dict[str, str]:
    """What each figure and table shows."""
    first = next(iter(result.parts.values()))
    probes, steps = next((d.nodes.shape for d in first.densities.values() if not d.exact), (0, 0))
    lanczos = f" from {plural(probes, 'probe')} of {plural(steps, 'Lanczos step')}" if probes else ""
    found = {
        "sharpness": "Largest eigenvalue λ_max of every diagonal block, the sharpest first; bars reach up to "
        "the bound that holds 95 times in 100.",
        "traces": "Trace of every diagonal block: exact where it was written out, else from own probes or "
        f"from {plural(len(first.traces.samples), 'probe')} that all blocks share, whichever says more (the "
        "table tells). Hatched: the 95 % interval includes zero.",
        "norms": "Frobenius norm of every diagonal block that was asked for.",
        "extremes": "Extreme eigenvalues of diagonal blocks; bars are the residuals.",
        "densities": f"Density of the eigenvalues of diagonal blocks{lanczos}, broadened by a kernel "
        "of the width in each title; the band is a 95 % interval over probes.",
        "heterogeneity": "Jensen–Shannon divergence between the spectra of blocks, in bits: 0 is equal, "
        "1 is no overlap. Both spectra of a pair are broadened alike, by a quarter of the root mean "
        "square eigenvalue of the larger one. In the table: standard error and bias over probes.",
    }
    return found | {operator: f"{TITLES[operator]}: {COLUMNS}{PROBES}" for operator in result.parts}
