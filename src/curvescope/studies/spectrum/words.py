"""What the spectra of a model say, in a sentence or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.algorithms.estimates.intervals import may_be_largest
from curvescope.core.numbers import one_of, plural, rounded, with_error
from curvescope.core.parts import MATRIX_SYMBOLS
from curvescope.viz.scenes import density

if TYPE_CHECKING:
    from curvescope.algorithms import BlockNorms, SpectralDensity
    from curvescope.studies.spectrum.study import Spectrum


NAMED = 3  # blocks of the largest norms


def of_blocks(result: Spectrum) -> str:
    """Which diagonal block of the Hessian is the largest, as far as intervals tell."""
    found = result.parts["hessian"].map
    norms, errors, low, high = (np.diag(x) for x in (found.frobenius, found.stderr, *found.interval))
    median = f"the median of {len(norms)} is {rounded(float(np.median(norms)), 2)}"
    first = may_be_largest(norms, low, high)
    if np.isnan(errors[first[0]]):
        each = ", ".join(f"{found.names[i]} {rounded(float(norms[i]), 2)}" for i in first[:NAMED])
        return (
            "Frobenius norms of the diagonal blocks of the Hessian are from one probe each and have no "
            f"error, so that their order is not known; the largest estimates are {each}, and {median}."
        )
    each = [f"{found.names[i]} ({with_error(float(norms[i]), float(errors[i]))})" for i in first]
    untold = ", which are not told apart" if len(each) > 1 else ""
    return (
        f"The diagonal block of the Hessian with the largest Frobenius norm is {one_of(each, NAMED)}{untold}"
        f"; {median}."
    )


def opening(result: Spectrum) -> str:
    """How far the ends reach, and which part of the Hessian they come from."""
    H, G, F = (result.parts[name] for name in ("hessian", "ggn", "functional"))
    low, high = float(H.extremes.values[0]), float(H.extremes.values[-1])
    found = "" if H.extremes.converged else " as far as the search went"
    said = f"The Hessian's eigenvalues reach from {rounded(low)} to {rounded(high)}{found}"
    trace, error = H.trace
    if trace > 2 * error > 0 and high > 0:
        said += f", and its trace is {with_error(trace, error)}, {rounded(trace / high, 2)} times the largest"
    said += "."
    if not G.traces.psd:
        return said
    top, functional = float(G.extremes.values[-1]), float(np.abs(F.extremes.values).max())
    negative = ", which brings every negative one" if low < 0 else ""
    return (
        f"{said} The GGN alone reaches {rounded(top)}, the functional Hessian {rounded(functional)} in size"
        f"{negative}."
    )


def captions(result: Spectrum) -> dict[str, str]:
    """What each figure and table shows."""
    H = result.parts["hessian"]
    shared = plural(len(H.traces.samples), "probe")
    return {
        "density": f"Above: {quadrature(H.density)} (Hessian; each panel says its own): what is narrower is "
        f"not seen. {errors(H.density)}; ticks mark the extreme eigenvalues, found by Lanczos. "
        "Below: the share of eigenvalues up to λ, without a kernel. For these probes it is certain to "
        "lie in the dark band; that of all eigenvalues lies in the light one 95 times in 100.",
        "block_map": "Diagonal blocks, layers to the right and roles downwards, those of no layer "
        "beside them; all have a trace, those of the map of pairs a norm. Colors are logarithmic, on both "
        "sides of zero where there are both signs.",
        "block_maps": "Root mean square entry of every block, diagonal and not, all on one scale. "
        "Where a name is that of a layer, its blocks follow in the order of the table of norms.",
        "traces": f"Trace of every diagonal block, from {shared} that all blocks "
        "share. In the figure bars are 95 % intervals; the table has the small blocks too, ± are standard "
        "errors, < x: below noise, the trace of a positive semi-definite block came out below zero.",
        "norms": f"Frobenius norm of every diagonal block; {_bars(H.map)}.",
        "extremes": "Extreme eigenvalues with the residual ‖A v − λ v‖ of a unit vector v: there is an "
        "eigenvalue within that distance. Converged: the residual is within the tolerance; verified: a "
        "search outside these vectors found none beyond them.",
    }


def density_scene(result: Spectrum) -> str:
    """What the scene of densities shows."""
    widths = [
        f"{rounded(part.density.width, 2)} ({MATRIX_SYMBOLS[name]})" for name, part in result.parts.items()
    ]
    d = result.parts["hessian"].density
    said = quadrature(d, ", ".join(widths))
    return density.caption(f"D{said[1:]}", errors(d))


def quadrature(d: SpectralDensity, width: str = "") -> str:
    """How a density was found, and the width of its kernel."""
    probes, steps = d.nodes.shape
    lanczos = f"stochastic Lanczos quadrature ({plural(probes, 'probe')}, {plural(steps, 'step')})"
    how = "all eigenvalues" if d.exact else lanczos
    return f"density by {how} under a kernel of width {width or rounded(d.width, 2)}"


def errors(d: SpectralDensity) -> str:
    """What is known about the error of a density."""
    if d.exact:
        return "It has no error"
    return (
        "The band is a 95 % interval over probes" if len(d.nodes) > 1 else "One probe: its error is unknown"
    )


def _bars(found: BlockNorms) -> str:
    """What bars of norms are."""
    if found.num_products == len(found.names):
        return "from one probe for each block, so that their errors are not known"
    return "bars are 95 % intervals, ± in the table is a standard error"
