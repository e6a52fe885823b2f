"""Figures and captions of the study `spectrum`, made from the arrays of its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from curvescope.algorithms import SpectralDensity
from curvescope.algorithms.estimates.intervals import may_be_largest
from curvescope.core.numbers import one_of, plural, rounded, with_error
from curvescope.core.parts import MATRIX_SYMBOLS, TITLES
from curvescope.viz import blocks, spectrum
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Cell, density, estimated, grid_map, layer_map, said, switched
from curvescope.viz.scenes.curves import nothing
from curvescope.viz.scenes.density import Spectrum as Shape
from curvescope.viz.scenes.density import eigenvalue_words, spectra
from curvescope.viz.style import LOOKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.algorithms import BlockNorms, Eigenpairs
    from curvescope.studies.spectrum.study import Part, Spectrum


def beside(result: Spectrum) -> dict[str, str]:
    """What the map of blocks says."""
    return {"block-map": of_blocks(result)}


def figures(result: Spectrum) -> dict[str, Figure]:
    """Densities, block maps, traces and norms, by name."""
    return {
        "density": _densities(result),
        "block_maps": _maps(result),
        "traces": _traces(result),
        "norms": _norms(result),
    }


def _densities(result: Spectrum) -> Figure:
    """Above, densities as a kernel shows them; below, cumulative distributions between their bounds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 6.4), layout="constrained")
    for (upper, lower), color, (name, part) in zip(
        axes.T, blocks.PALETTE, result.parts.items(), strict=False
    ):
        d = replace(part.density, psd=name == "ggn")  # older results do not say
        upper.set_prop_cycle(color=[color])
        spectrum.density(upper, *d.band(), nodes=part.extremes.values, log_y=True)
        upper.set_title(TITLES[name], fontsize=11)
        upper.axvline(0, color="0.6", lw=0.6)
        upper.locator_params(axis="x", nbins=5)
        d.plot_cumulative(lower, color=color)
        lower.set_title(d.words, fontsize=8, color="0.3")
    return figure


def _maps(result: Spectrum) -> Figure:
    import matplotlib.pyplot as plt

    maps = {name: part.map for name, part in result.parts.items()}
    scaled = {
        name: m.frobenius / np.sqrt(np.outer(m.sizes, m.sizes)) for name, m in maps.items()
    }  # root mean square entry: comparable between blocks of different size
    positive = np.concatenate([values[values > 0] for values in scaled.values()])
    top = float(positive.max(initial=1e-300))
    limits = (max(top * 1e-6, float(positive.min(initial=top))), top)
    figure, axes = plt.subplots(1, 3, figsize=(11.5, 4.2), layout="constrained", sharey=True)
    for ax, (name, values) in zip(axes, scaled.items(), strict=True):
        blocks.heat_map(ax, maps[name].names, values, limits=limits, color_bar=False)
        ax.set_title(TITLES[name], fontsize=11)
    figure.colorbar(axes[0].images[0], ax=axes, label="root mean square entry", shrink=0.9)
    return figure


def _traces(result: Spectrum) -> Figure:
    """The blocks of the map; the table has all of them."""
    names = result.parts["hessian"].traces.names
    shown = [i for i, name in enumerate(names) if name in result.parts["hessian"].map.names]
    series = {
        f"tr {MATRIX_SYMBOLS[n]}": (
            p.traces.values[shown],
            p.traces.interval[0][shown],
            p.traces.interval[1][shown],
        )
        for n, p in result.parts.items()
    }
    return _figure_bars([names[i] for i in shown], series, "trace of the block")


def _norms(result: Spectrum) -> Figure:
    names = result.parts["hessian"].map.names
    series = {
        f"‖{MATRIX_SYMBOLS[n]}‖": (
            np.diag(p.map.frobenius),
            np.diag(p.map.interval[0]),
            np.diag(p.map.interval[1]),
        )
        for n, p in result.parts.items()
    }
    return _figure_bars(names, series, "Frobenius norm of the block")


def _figure_bars(
    names: list[str], series: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]], label: str
) -> Figure:
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(12, 3.6), layout="constrained")
    blocks.bars(ax, names, series, label=label)
    return figure


# --------------------------------------------------------------------------------------------------- captions

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
        "norms": f"Frobenius norm of every diagonal block; {_caption_bars(H.map)}.",
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


def _caption_bars(found: BlockNorms) -> str:
    """What bars of norms are."""
    if found.num_products == len(found.names):
        return "from one probe for each block, so that their errors are not known"
    return "bars are 95 % intervals, ± in the table is a standard error"


# ----------------------------------------------------------------------------------------------------- scenes

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
