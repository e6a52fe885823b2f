"""What the spectra of a model say, in a sentence or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.numbers import rounded, with_error

if TYPE_CHECKING:
    from curvescope.studies.spectrum.study import Spectrum


NAMED = 3  # blocks of the largest norms


def of_blocks(result: Spectrum) -> str:
    """Which diagonal blocks of the Hessian are the largest."""
    found = result.parts["hessian"].map
    norms = np.diag(found.frobenius)
    order = np.argsort(-norms)
    each = [f"{found.names[i]} {rounded(float(norms[i]), 2)}" for i in order[:NAMED]]
    median = rounded(float(np.median(norms)), 2)
    return (
        f"The diagonal blocks of the Hessian with the largest Frobenius norms are {', '.join(each)}; the "
        f"median of {len(norms)} is {median}."
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
        f"{said} The GGN alone reaches {rounded(top)}, the functional part {rounded(functional)} in size"
        f"{negative}."
    )
