"""The scenes of the study `spectrum`: from its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from curvescope.algorithms import SpectralDensity
from curvescope.core.parts import MATRIX_SYMBOLS, TITLES
from curvescope.studies.spectrum.words import density_scene
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Cell, estimated, grid_map, layer_map, said, switched
from curvescope.viz.scenes.density import Spectrum as Shape
from curvescope.viz.scenes.density import eigenvalue_words, spectra
from curvescope.viz.scenes.parts import nothing
from curvescope.viz.style import LOOKS

if TYPE_CHECKING:
    from curvescope.algorithms import Eigenpairs
    from curvescope.studies.spectrum.study import Part, Spectrum

POINTS = 160  # of a density: six for every width of the kernel, or nearly
CHOICES = {"hessian": "H", "ggn": "GGN", "functional": "functional"}
"""Of the switch between matrices."""
TOP = "λ_max"
QUANTITIES = {"norm": "‖·‖_F", "trace": "trace", TOP: TOP, "rms": "root mean square entry"}
UNMEASURED = "λ_max of single blocks is not measured here:<br>curvescope run blocks measures it"


def scenes(result: Spectrum) -> dict[str, Scene]:
    """Spectra, the map of blocks, and that of pairs of blocks."""
    return {
        "density": spectra([
            shape(name, replace(part.density, psd=name == "ggn"), part.extremes)
            for name, part in result.parts.items()
        ]) | {"caption": density_scene(result)},
        "block_map": _block_map(result),
        "block_maps": _pairs(result),
    }  # fmt: skip


def shape(name: str, density: SpectralDensity, extremes: Eigenpairs | None) -> Shape:
    """The spectrum of a matrix as a scene draws it."""
    grid, values, (low, high) = density.band()
    kept = np.unique(np.linspace(0, len(grid) - 1, min(len(grid), POINTS)).round().astype(int))
    edges, share, bounds = density.shares()
    out = density.outliers()
    symbol = MATRIX_SYMBOLS[name]
    ends = {}
    if extremes is not None:
        sure = extremes.converged_mask.tolist()
        for value, residual, c in zip(
            extremes.values.tolist(), extremes.residuals.tolist(), sure, strict=True
        ):
            ends[value] = eigenvalue_words(symbol, value, residual, converged=c)
    apart = {
        float(v): f"{symbol}: outlier at {said(float(v), float(s))}<br>"
        f"eigenvalues there: {said(float(n), float(e))}"
        for v, s, n, e in zip(out.values, out.spread, out.count, out.count_stderr, strict=True)
    }
    return Shape(
        TITLES[name], LOOKS[name], grid[kept], values[kept], (low[kept], high[kept]), edges, share, bounds,
        ends, apart,
    )  # fmt: skip


def _block_map(result: Spectrum) -> Scene:
    """Diagonal blocks, layers × roles: all blocks have a trace, those of the map a norm."""
    matrices = {CHOICES[name]: name for name in result.parts}
    rows = {q: _cells(result.parts["hessian"], "", q) for q in QUANTITIES if q != TOP}

    def draw(matrix: str, quantity: str) -> Scene:
        if quantity == TOP:
            return nothing(UNMEASURED, 220)
        part = result.parts[matrices[matrix]]
        cells = _cells(part, MATRIX_SYMBOLS[matrices[matrix]], quantity)
        colors = "signed" if quantity == "trace" else "log"
        label = f"{QUANTITIES[quantity]}, {TITLES[matrices[matrix]]}"
        return layer_map(cells, label=label, colors=colors, names=list(rows[quantity]))

    return switched({"matrix": list(matrices), "quantity": list(QUANTITIES)}, draw)


def _cells(part: Part, symbol: str, quantity: str) -> Mapping[str, Cell]:
    size = dict(zip(part.map.names, part.map.sizes.tolist(), strict=True))
    if quantity == "trace":
        found = zip(part.traces.names, part.traces.values.tolist(), part.traces.stderr.tolist(), strict=True)
    else:
        norms, errors = np.diag(part.map.frobenius), np.diag(part.map.stderr)
        scale = part.map.sizes if quantity == "rms" else np.ones(len(norms))
        found = zip(part.map.names, (norms / scale).tolist(), (errors / scale).tolist(), strict=True)
    return {
        name: Cell(value, _words(name, f"{QUANTITIES[quantity]} of {symbol}", value, error, size.get(name)))
        for name, value, error in found
    }


def _words(name: str, what: str, value: float, error: float, size: int | None) -> str:
    count = f"<br>{size:,} parameters" if size else ""
    return f"<b>{name}</b><br>{what}: {estimated(value, error)}{count}"


def _pairs(result: Spectrum) -> Scene:
    """Every pair of blocks, all matrices in the same colors."""
    matrices = {CHOICES[name]: name for name in result.parts}
    scales = {n: np.sqrt(np.outer(p.map.sizes, p.map.sizes)) for n, p in result.parts.items()}
    known = np.concatenate([(p.map.frobenius / scales[n]).ravel() for n, p in result.parts.items()])
    top = float(known.max(initial=1e-300))
    limits = max(top * 1e-6, float(known[known > 0].min(initial=top))), top

    def draw(matrix: str) -> Scene:
        name = matrices[matrix]
        m, scale = result.parts[name].map, scales[name]
        cells = [
            [
                Cell(float(m.frobenius[i, j] / scale[i, j]), f"<b>{a}, {b}</b><br>root mean square entry: "
                     + estimated(float(m.frobenius[i, j] / scale[i, j]), float(m.stderr[i, j] / scale[i, j])))
                for j, b in enumerate(m.names)
            ]
            for i, a in enumerate(m.names)
        ]  # fmt: skip
        label = f"root mean square entry, {TITLES[name]}"
        return grid_map(m.names, m.names, cells, label=label, limits=limits)

    return switched({"matrix": list(matrices)}, draw)
