"""Figures and captions of the study `spectrum`, made from the arrays of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from curvescope.algorithms import SpectralDensity
from curvescope.algorithms.estimates.intervals import may_be_largest
from curvescope.core.hessian_terms import MATRIX_SYMBOLS, TITLES
from curvescope.core.number_format import one_of, plural, rounded
from curvescope.sampling import rank
from curvescope.viz import blocks
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Cell, density, grid_map, in_interval, layer_map, said, switched
from curvescope.viz.scenes.curves import nothing
from curvescope.viz.scenes.density import Spectrum as Shape
from curvescope.viz.scenes.density import eigenvalue_words, spectra
from curvescope.viz.style import LOOKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.algorithms import BlockNorms, Eigenpairs
    from curvescope.studies.spectrum.study import Part, Spectrum


def beside(result: Spectrum) -> dict[str, str]:
    """Return the sentences beside the map of blocks."""
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
    """Draw densities under a kernel above, and cumulative distributions between their bounds below."""
    import matplotlib.pyplot as plt

    columns = len(result.parts)
    size = (4.3 * columns, 6.4)
    figure, axes = plt.subplots(2, columns, figsize=size, layout="constrained", squeeze=False)
    for (upper, lower), color, (name, part) in zip(
        axes.T, blocks.PALETTE, result.parts.items(), strict=False
    ):
        d = replace(part.density, psd=name == "ggn")  # older results do not store psd
        upper.set_prop_cycle(color=[color])
        d.plot(upper, eigenvalues=part.extremes.values, note=False)
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
    figure, grid = plt.subplots(
        1, len(maps), figsize=(3.8 * len(maps), 4.2), layout="constrained", sharey=True, squeeze=False
    )
    axes = grid[0]
    for ax, (name, values) in zip(axes, scaled.items(), strict=True):
        blocks.heat_map(ax, maps[name].names, values, limits=limits, color_bar=False)
        ax.set_title(TITLES[name], fontsize=11)
    figure.colorbar(axes[0].images[0], ax=axes, label="root mean square entry", shrink=0.9)
    return figure


def _traces(result: Spectrum) -> Figure:
    """Draw the traces of the blocks of the map; the table has all blocks."""
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
    """State the diagonal block of the Hessian with the largest norm, and its rivals."""
    part = result.parts["hessian"]
    norm_map = part.map
    norms, low, high = (np.diag(x) for x in (norm_map.frobenius, *norm_map.interval))
    median = f"the median of {len(norms)} is {rounded(float(np.median(norms)), 2)}"
    first = may_be_largest(norms, low, high)
    if np.isnan(high[first[0]]) and not part.sampled_norms:
        each = ", ".join(f"{norm_map.names[i]} {rounded(float(norms[i]), 2)}" for i in first[:NAMED])
        return (
            "Frobenius norms of the diagonal blocks of the Hessian are from one probe each, so their errors "
            f"and their order are not known; the largest estimates are {each}, and {median}."
        )
    if part.sampled_norms:
        order = rank(part.sampled_norms)
        top = part.sampled_norms[order.names[0]]
        return (
            f"The diagonal block of the Hessian with the largest Frobenius norm is {order.names[0]} "
            f"({top.headline}, {top.verdict()}); {median}. Among the blocks with the {len(order.names)} "
            f"largest norms {order.words}."
        )
    each = [f"{norm_map.names[i]} ({in_interval(norms[i], low[i], high[i])})" for i in first]
    undecided = ", which are not told apart" if len(each) > 1 else ""
    return (
        f"The diagonal block of the Hessian with the largest Frobenius norm is {one_of(each, NAMED)}"
        f"{undecided}; {median}."
    )


def opening(result: Spectrum) -> str:
    """State the ends of the spectrum with their verdict, and the part of the Hessian that they come from."""
    H, G, F = (result.parts.get(name) for name in ("hessian", "ggn", "functional"))
    assert H is not None
    low, high = float(H.extremes.values[0]), float(H.extremes.values[-1])
    searched = "" if H.extremes.converged else " as far as the search went"
    ends = [H.headline(name, x, 0.0) for name, x in (("lambda_min", low), ("lambda_max", high))]
    sentence = f"The Hessian's eigenvalues reach from {ends[0]} to {ends[1]}{searched}"
    if "lambda_max" in H.sampled:
        sentence += f" (λ_max: {H.sampled['lambda_max'].verdict()})"
    trace, error = H.trace
    numbers = [H.sampled[name] for name in ("trace", "lambda_max") if name in H.sampled]
    if trace > 2 * error > 0 and high > 0 and not any(number.low <= 0 for number in numbers):
        sentence += f"; the trace is {H.headline('trace', trace, error)}"
        if all(number.settled() for number in numbers):
            sentence += f", {rounded(trace / high, 2)} times λ_max"
    sentence += "."
    if G is None or F is None or not G.traces.psd:
        return sentence
    top, functional = float(G.extremes.values[-1]), float(np.abs(F.extremes.values).max())
    negative = "; all negative eigenvalues come from it" if low < 0 else ""
    return (
        f"{sentence} The GGN alone reaches {G.headline('lambda_max', top, 0.0)}, the functional Hessian "
        f"{rounded(functional, 2)} in size{negative}."
    )


def captions(result: Spectrum) -> dict[str, str]:
    """Captions of figures and tables, by name."""
    H = result.parts["hessian"]
    shared = plural(len(H.traces.samples), "probe")
    return {
        "density": f"Above: {quadrature(H.density)} (Hessian; each panel says its own): what is narrower is "
        "not seen; dotted where the shape is the kernel's or little is certain. Gray: what the steps leave "
        "open; dark bar: 90 % of eigenvalues or more, where the kernel hides their shape. "
        f"{errors(H.density)}; ticks mark the extreme eigenvalues, found by Lanczos. "
        "Below: the share of eigenvalues up to λ, without a kernel. For these probes it is certain to "
        "lie in the dark band; that of all eigenvalues lies in the light one 95 times in 100 "
        "(numerical only: other data are not included).",
        "block_map": "Diagonal blocks, layers to the right and roles downwards, those of no layer "
        "beside them; all have a trace, those of the map of pairs a norm. Colors are logarithmic, on both "
        "sides of zero if there are both signs.",
        "block_maps": "Root mean square entry of every block, diagonal and not, all on one scale. "
        "Where a name is that of a layer, its blocks follow in the order of the table of norms.",
        "traces": f"Trace of every diagonal block, from {shared} that all blocks "
        "share. In the figure bars are 95 % intervals over probes (numerical), in the table their ends are "
        "_numerical_low and _numerical_high; the table has the small blocks too, < x: below noise, the trace "
        "of a positive semi-definite block came out below zero.",
        "norms": f"Frobenius norm of every diagonal block; {_caption_bars(H.map)}.",
        "headline": "Headline numbers with one standard error over probes or a residual (numerical), one "
        "over other data of this kind and size (sampling), and the 95 % interval from both (low to high).",
        "extremes": "Extreme eigenvalues with the residual ‖A v − λ v‖ of a unit vector v (numerical): there "
        "is an eigenvalue within that distance. The outermost have a standard error over other data of this "
        "size (sampling) and a 95 % interval from both errors. Converged: the residual is within "
        "the tolerance; verified: a search outside these vectors found none beyond them.",
    }


def density_scene(result: Spectrum) -> str:
    """Caption of the interactive densities."""
    widths = [
        f"{rounded(part.density.width, 2)} ({MATRIX_SYMBOLS[name]})" for name, part in result.parts.items()
    ]
    d = result.parts["hessian"].density
    words = quadrature(d, ", ".join(widths))
    return density.caption(f"D{words[1:]}", errors(d))


def quadrature(d: SpectralDensity, width: str = "") -> str:
    """Describe the method of a density and the width of its kernel."""
    probes, steps = d.nodes.shape
    lanczos = f"stochastic Lanczos quadrature ({plural(probes, 'probe')}, {plural(steps, 'step')})"
    how = "all eigenvalues" if d.exact else lanczos
    return f"density by {how} under a kernel of width {width or rounded(d.width, 2)}"


def errors(d: SpectralDensity) -> str:
    """Describe the error of a density."""
    if d.exact:
        return "The density is exact"
    return (
        "The band is a 95 % interval over probes (numerical only)"
        if len(d.nodes) > 1
        else "One probe: its error is unknown"
    )


def _caption_bars(norms: BlockNorms) -> str:
    """Describe the bars of norms."""
    if norms.num_products == len(norms.names):
        return "from one probe for each block, so that their errors are not known"
    return "bars are 95 % intervals over probes, _numerical_low and _numerical_high in the table"


# ----------------------------------------------------------------------------------------------------- scenes

POINTS = 160  # most points of a drawn density: about six for every width of the kernel
CHOICES = {"hessian": "H", "ggn": "GGN", "functional": "functional"}  # of the switch between matrices
TOP = "λ_max"
QUANTITIES = {"norm": "‖·‖_F", "trace": "trace", TOP: TOP, "rms": "root mean square entry"}
UNMEASURED = "λ_max of single blocks is not measured here:<br>curvescope run blocks measures it"


def scenes(result: Spectrum) -> dict[str, Scene]:
    """Interactive figures: spectra, the map of blocks, and the map of pairs of blocks."""
    return {
        "density": spectra([
            shape(name, replace(part.density, psd=name == "ggn"), part.extremes)
            for name, part in result.parts.items()
        ]) | {"caption": density_scene(result)},
        "block_map": _block_map(result),
        "block_maps": _pairs(result),
    }  # fmt: skip


def shape(name: str, density: SpectralDensity, extremes: Eigenpairs | None) -> Shape:
    """Prepare the spectrum of a matrix for an interactive figure."""
    known = None if extremes is None else extremes.values
    grid, values, (low, high) = density.band(ends=known)
    kept = np.unique(np.linspace(0, len(grid) - 1, min(len(grid), POINTS)).round().astype(int))
    certain = None
    if not density.exact:
        lower, upper = density.certain_bounds(grid, ends=known)
        certain = lower[kept], upper[kept]
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
        ends, apart, certain, density.known(grid, known)[kept],
    )  # fmt: skip


def _block_map(result: Spectrum) -> Scene:
    """Interactive map of diagonal blocks, layers × roles; blocks outside the map only have a trace."""
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
        names, numbers = part.traces.names, np.array([part.traces.values, *part.traces.interval])
    else:
        names = part.map.names
        numbers = np.array([np.diag(x) for x in (part.map.frobenius, *part.map.interval)])
        numbers = numbers / (part.map.sizes if quantity == "rms" else 1.0)
    what = f"{QUANTITIES[quantity]} of {symbol}"
    return {
        name: Cell(own[0], _words(name, what, own, size.get(name)))
        for name, own in zip(names, numbers.T.tolist(), strict=True)
    }


def _words(name: str, what: str, numbers: Sequence[float], size: int | None) -> str:
    count = f"<br>{size:,} parameters" if size else ""
    return f"<b>{name}</b><br>{what}: {in_interval(*numbers)}{count}"


def _pairs(result: Spectrum) -> Scene:
    """Interactive map of every pair of blocks, all matrices in the same colors."""
    matrices = {CHOICES[name]: name for name in result.parts}
    scales = {n: np.sqrt(np.outer(p.map.sizes, p.map.sizes)) for n, p in result.parts.items()}
    known = np.concatenate([(p.map.frobenius / scales[n]).ravel() for n, p in result.parts.items()])
    top = float(known.max(initial=1e-300))
    limits = max(top * 1e-6, float(known[known > 0].min(initial=top))), top

    def draw(matrix: str) -> Scene:
        name = matrices[matrix]
        m = result.parts[name].map
        numbers = np.array([m.frobenius, *m.interval]) / scales[name]
        cells = [
            [
                Cell(float(numbers[0, i, j]), f"<b>{a}, {b}</b><br>root mean square entry: "
                     + in_interval(*numbers[:, i, j].tolist()))
                for j, b in enumerate(m.names)
            ]
            for i, a in enumerate(m.names)
        ]  # fmt: skip
        label = f"root mean square entry, {TITLES[name]}"
        return grid_map(m.names, m.names, cells, label=label, limits=limits)

    return switched({"matrix": list(matrices)}, draw)
