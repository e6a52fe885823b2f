"""Tables, figures and captions of the study `blocks`, made from the arrays of its result."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.core.hessian_terms import MATRIX_SYMBOLS, TITLES
from curvescope.core.number_format import LIES_BETWEEN, between, bound, plural, rounded, with_error
from curvescope.runs.study_result import Line
from curvescope.studies.blocks.analysis import Part
from curvescope.studies.common.sampling import line
from curvescope.studies.spectrum.view import CHOICES, errors, quadrature, shape
from curvescope.viz import blocks, style
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Cell, density, grid_map, in_interval, layer_map, said, switched
from curvescope.viz.scenes.density import spectra
from curvescope.viz.style import LOOKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.algorithms import Eigenpairs
    from curvescope.studies.blocks.study import Blocks


def beside(result: Blocks) -> dict[str, str]:
    """Return the sentences beside the map of blocks."""
    return {"blocks": spread(result)}


NAMED = 4  # most blocks that a line names
MOST_RANKED = 40  # blocks in the figure of the sharpest


def summary(result: Blocks) -> list[Line]:
    """Headline numbers: label, value, words."""
    size = dict(zip(result.names, result.sizes.tolist(), strict=True))
    where = f"{result.num_terms:g} terms of {result.data}"
    rows: list[Line] = []
    for operator, part in result.parts.items():
        rows += [*_sharpest(part, TITLES[operator]), *_traces(part, TITLES[operator], size)]
        if part.heterogeneity is not None:
            h = part.heterogeneity
            words = f"bits, mean over the pairs of {plural(len(h.names), 'block')}: 0 is equal spectra, "
            rows.append(("Jensen–Shannon", with_error(h.mean, h.mean_stderr), f"{words}1 no overlap"))
    rows.append(("loss", f"{result.loss:.4f}", f"{result.loss_name} over {where}"))
    return [*rows, *(("note", "", note) for note in result.notes)]


def opening(result: Blocks) -> str:
    """State the sharpest block, its λ_max and the learning rate that it allows."""
    operator, part = next(iter(result.parts.items()))
    order = part.ranking()
    sentence = f"On {result.num_terms:g} terms of {result.data} "
    if "lambda_max" in part.sampled:
        number = part.sampled["lambda_max"]
        rate = number.inverse(2.0, "2/λ_max").headline
        sentence += (
            f"λ_max of the {TITLES[operator]} is {number.headline} ({number.verdict()}), so plain gradient "
            f"descent is stable up to a learning rate of 2/λ_max, {rate}. "
        )
        if not order:
            return sentence.rstrip()
    if not order:
        return ""
    values = np.array([part.sharpness(name).largest for name in order])
    median = float(np.median(values))
    top = _top_of(part, order[0])
    sentence += f"{order[0]} is the sharpest block of the {TITLES[operator]}, with λ_max {top}"
    if median > 0 and len(order) > 2:
        sentence += f", {rounded(values[0] / median, 2)} times that of the median of {_of_all(result, order)}"
    sentence += _rivals(part, order)
    if "lambda_max" not in part.sampled and part.whole is not None and part.whole.values[1] > 0:
        top, high = float(part.whole.values[1]), part.whole.high
        sentence += (
            f". Together they reach {between(top, high)}: on these terms plain gradient descent is stable up "
            f"to a learning rate of 2/λ_max, {between(2 / high, 2 / top, 3)}"
        )
    return f"{sentence}."


def _top_of(part: Part, name: str) -> str:
    """Format λ_max of a block for a sentence."""
    number = part.sampled_blocks.get(name)
    return rounded(part.sharpness(name).largest) if number is None else number.headline


def _of_all(result: Blocks, order: list[str]) -> str:
    """Return `27 of 69 blocks`, or `69 blocks` if λ_max of all is known."""
    count, known = len(order), len(result.names)
    return f"{count} of {known} blocks" if count < known else plural(count, "block")


def _rivals(part: Part, order: list[str]) -> str:
    """Return `; P may be sharper (858 to 921)`, or the blocks that may be sharpest on other data."""
    sharpness = {name: part.sharpness(name) for name in order}
    if len(part.sampled_blocks) > 1:
        return f"; of the {len(part.sampled_blocks)} sharpest blocks {part.order.words}"
    rivals = [name for name in order[1:] if sharpness[name].high > sharpness[order[0]].largest][:NAMED]
    each = ", ".join(f"{name} ({between(sharpness[name].largest, sharpness[name].high)})" for name in rivals)
    return f"; {each} may be sharper" if rivals else ""


def spread(result: Blocks) -> str:
    """State the range of λ_max over blocks, and the distance between their spectra."""
    operator, part = next(iter(result.parts.items()))
    order = part.ranking()
    if len(order) < 2:
        return ""
    values = [part.sharpness(name).largest for name in order]
    sentence = (
        f"λ_max of {plural(len(order), 'block')} of the {TITLES[operator]} goes from "
        f"{rounded(values[-1], 2)} ({order[-1]}) to {rounded(values[0], 2)} ({order[0]}); its median is "
        f"{rounded(float(np.median(values)), 2)}."
    )
    if part.heterogeneity is None:
        return sentence
    h = part.heterogeneity
    return (
        f"{sentence} Spectra of {len(h.names)} of them are {with_error(h.mean, h.mean_stderr)} bits apart in "
        "the mean (Jensen–Shannon: 0 is equal, 1 no overlap)."
    )


def _sharpest(part: Part, title: str) -> list[Line]:
    """Lines of the sharpest block, the learning rate that it allows, and its λ_max over the median."""
    order = part.ranking()
    sharpness = {name: part.sharpness(name) for name in order}
    rows: list[Line] = []
    alone = ""
    if order:
        each = [between(sharpness[name].largest, sharpness[name].high) for name in order]
        then = ", ".join(f"{name} {value}" for name, value in zip(order[1:NAMED], each[1:], strict=False))
        words = f"λ_max {each[0]}" + (f", then {then}" if then else "")
        words += f"; {LIES_BETWEEN}" if " to " in words else ""
        if part.sampled_blocks:
            words = f"{part.order.words}; {part.sampled_blocks[part.order.names[0]].verdict()}; {words}"
        rows = [(f"sharpest, {title}", order[0], words)]
        alone = f"; {order[0]} alone allows {sharpness[order[0]].ceiling:.3g}"
    unstable = "2/λ_max: beyond it gradient descent moves away from a minimum"
    if "lambda_max" in part.sampled:
        number = part.sampled["lambda_max"]
        rows = [
            line(f"λ_max, {title}", number, "of all blocks together"),
            *rows,
            line(f"learning rate below, {title}", number.inverse(2.0, "2/λ_max"), f"{unstable}{alone}"),
        ]
    elif part.whole is not None and part.whole.values[1] > 0:
        top, high = float(part.whole.values[1]), part.whole.high
        words = (
            f"{unstable}; λ_max of all blocks together is {between(top, high)} on these terms, and other or "
            f"fewer have another ceiling{alone}"
        )
        rows.append((f"learning rate below, {title}", between(2 / high, 2 / top, 3), words))
    if not order:
        return rows
    values = np.array([s.largest for s in sharpness.values()])
    median = float(np.median(values))
    if median > 0 and len(values) > 1:
        words = f"times: λ_max of the sharpest of {plural(len(values), 'block')} over that of the median one"
        ratio = values.max() / median
        rows.append(
            (f"sharpest over median, {title}", f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}", words)
        )
    return rows


def _traces(part: Part, title: str, size: dict[str, int]) -> list[Line]:
    """Lines of the trace and the norm of all blocks, and of the number of traces within noise."""
    names = part.traces.names
    total = f"of {plural(len(names), 'block')} with {sum(size[n] for n in names):,} parameters"
    if "trace" in part.sampled:
        rows = [line(f"trace, {title}", part.sampled["trace"], total)]
    else:
        words = f"{total}; ± is one standard error over probes (numerical)"
        rows = [(f"trace, {title}", with_error(*part.trace), words)]
    if "norm" in part.sampled:
        rows.append(line(f"Frobenius norm, {title}", part.sampled["norm"], "of all blocks together"))
    noise = [n for n in names if part.is_noise(n)]
    share = float(np.median([part.noise(n) for n in names]))
    if noise:
        named = ", ".join(noise[:NAMED]) + (", …" if len(noise) > NAMED else "")
        words = (
            f"of {plural(len(names), 'block')} have a trace that cannot be told from zero, which its 95 % "
            f"interval includes ({named}); λ_max is measured separately"
        )
        if share < 1:
            words += f"; the trace of the median block is known to within {100 * share:.0f} %"
        rows.append((f"traces within noise, {title}", str(len(noise)), words))
    return rows


def _how_many(part: Part) -> str:
    """Return `every diagonal block`, or `40 of 69 diagonal blocks`."""
    shown, known = min(MOST_RANKED, len(part.ranking())), len(part.ranking())
    if known < len(part.traces.names):
        return f"{shown} of {plural(len(part.traces.names), 'diagonal block')}"
    return "every diagonal block" if shown == known else f"{shown} of {known} diagonal blocks"


COLUMNS = (
    "λ_max with its residual ‖A v − λ v‖ (numerical: there is an eigenvalue within that distance), of the "
    "sharpest blocks one standard error over other data of this size (sampling) and the 95 % interval from "
    "both errors (low to high), the bound on these terms that λ_max is below 95 times in 100 (bound), and "
    "2 divided by that bound, the learning rate that the block alone allows (ceiling); λ_min likewise, which "
    "is above its bound 95 times in 100; trace and Frobenius norm with one standard error over probes "
    "(numerical) and its 95 % interval (low to high). "
)
PROBES = (
    "Probes: exact, the block was written out with one product per entry; own, from Lanczos steps and probes "
    "of the block alone; shared, from probes of all blocks at once. Noise: half the interval of the trace "
    "over its size; 1: all of it."
)


def captions(result: Blocks) -> dict[str, str]:
    """Captions of figures and tables, by name."""
    first = next(iter(result.parts.values()))
    probes, steps = next((d.nodes.shape for d in first.densities.values() if not d.exact), (0, 0))
    lanczos = f" from {plural(probes, 'probe')} of {plural(steps, 'Lanczos step')}" if probes else ""
    texts = {
        "sharpness": f"Largest eigenvalue λ_max of {_how_many(first)}, the sharpest first; thick bars reach "
        "up to the bound on these terms that holds 95 times in 100 (numerical), thin bars are 95 % intervals "
        "from both errors, over other data of this size (sampling).",
        "block_map": "Every diagonal block, layers to the right and roles downwards, those of no layer "
        "beside them; rows without a number of the chosen quantity are left out. Colors are logarithmic, on "
        "both sides of zero if there are both signs. Empty: not measured, or not positive.",
        "traces": "Trace of every diagonal block: exact where it was written out, else from own probes or "
        f"from {plural(len(first.traces.samples), 'probe')} that all blocks share (the table tells). "
        "Hatched: the 95 % interval includes zero.",
        "norms": "Frobenius norm of every diagonal block that was measured.",
        "extremes": "Extreme eigenvalues of diagonal blocks; bars are the residuals.",
        "densities": f"Density of the eigenvalues of diagonal blocks{lanczos}, broadened by a kernel "
        "of the width in each title; the band is a 95 % interval over probes (numerical only).",
        "heterogeneity": "Jensen–Shannon divergence between the spectra of blocks, in bits: 0 is equal, "
        "1 means that they do not overlap. Both spectra of a pair are broadened alike, by a quarter of the "
        "root mean square eigenvalue of the larger one. In the table: standard error and bias over probes.",
    }
    return texts | {operator: f"{TITLES[operator]}: {COLUMNS}{PROBES}" for operator in result.parts}


def density_scene(result: Blocks) -> str:
    """Caption of the interactive densities of blocks."""
    densities = next(iter(result.parts.values())).densities
    first = next((d for d in densities.values() if not d.exact), next(iter(densities.values())))
    exact = "; of blocks that were written out all eigenvalues are known" if not first.exact else ""
    what = quadrature(first, "its range over the number of steps")
    return density.caption(f"One diagonal block at a time: {what}", errors(first) + exact)


# ---------------------------------------------------------------------------------------------------- figures

LAYER = re.compile(r"L(\d+)\.(.+)")
DECADES = 4  # of the colors, below the largest value
PANELS_PER_ROW = 5
CELL = 0.5  # inches that the number of a cell takes
Numbers = Mapping[str, tuple[float, float, float]]  # value and the ends of its interval by block


def figures(result: Blocks) -> dict[str, Figure]:
    """Figures by name: maps of traces and norms; eigenvalues, densities and divergences if measured."""
    traces = {
        operator: {
            name: (part.trace_of(name)[0], *part.trace_interval(name))
            for name in result.names
            if part.trace_of(name)[2]
        }
        for operator, part in result.parts.items()
    }
    norms = {
        operator: {name: (n.norm, n.norm_low, n.norm_high) for name, n in part.norms.items()}
        for operator, part in result.parts.items()
    }
    first = next(iter(result.parts.values()))
    drawn = {"sharpness": _sharpness(result)} if len(first.ranking()) > 1 else {}
    drawn["traces"] = _maps(traces, "trace of the block", signed=True)
    if first.norms:
        drawn["norms"] = _maps(norms, "Frobenius norm of the block", signed=False)
    if first.extremes:
        drawn["extremes"] = _extremes(result)
    if first.densities:
        drawn["densities"] = _figure_densities(result)
    if first.heterogeneity is not None:
        drawn["heterogeneity"] = _figure_heterogeneity(result)
    return drawn


def _maps(numbers: Mapping[str, Numbers], label: str, *, signed: bool) -> Figure:
    """Layer × role maps, one row of panels per operator; bars if no block belongs to a layer."""
    import matplotlib.pyplot as plt

    names = list(next(iter(numbers.values())))
    inside = [match for name in names if (match := LAYER.fullmatch(name))]
    if not inside:
        figure, ax = plt.subplots(figsize=(12, 3.6), layout="constrained")
        series = {MATRIX_SYMBOLS[o]: _columns(by_block, names) for o, by_block in numbers.items()}
        blocks.bars(ax, names, series, label=label)
        return figure
    layers = sorted({int(match[1]) for match in inside})
    roles = list(dict.fromkeys(match[2] for match in inside))
    outside = [name for name in names if not LAYER.fullmatch(name)]
    height = 1.3 + 0.27 * max(len(layers), 4)
    size = (2.5 + CELL * (len(roles) + len(outside)), height * len(numbers) + 0.3)
    ratio = [max(len(roles), 2), max(len(outside), 1)]
    figure, axes = plt.subplots(
        len(numbers), 2, figsize=size, layout="constrained", width_ratios=ratio, squeeze=False
    )
    norm = _scale([item[0] for by_block in numbers.values() for item in by_block.values()], signed)
    for (left, right), (operator, by_block) in zip(axes, numbers.items(), strict=True):
        cells = [[f"L{layer}.{role}" for role in roles] for layer in layers]
        image = _figure_cells(left, cells, by_block, norm, signed)
        left.set_xticks(range(len(roles)), roles, rotation=90)
        left.set_yticks(range(len(layers)), [f"L{layer}" for layer in layers])
        left.set_title(TITLES[operator], fontsize=11)
        right.set_visible(bool(outside))
        if outside:
            _figure_cells(right, [outside], by_block, norm, signed)
            right.set_xticks(range(len(outside)), outside, rotation=90)
            right.set_yticks([])
        bar = figure.colorbar(image, ax=[left, right], label=label, pad=0.01, aspect=12)
        bar.set_ticks(blocks.color_ticks(norm), minor=False)
        bar.minorticks_off()
    return figure


def _columns(by_block: Numbers, names: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    triples = np.array([by_block[name] for name in names], dtype=float)
    return triples[:, 0], triples[:, 1], triples[:, 2]


def _scale(values: list[float], signed: bool) -> Any:
    """Colors over four decades, on both sides of zero if there are negative values."""
    from matplotlib.colors import LogNorm, SymLogNorm

    top = blocks.largest(values)
    if signed and min(values) < 0:
        return SymLogNorm(linthresh=top * 10.0**-DECADES, vmin=-top, vmax=top)
    return LogNorm(vmin=top * 10.0**-DECADES, vmax=top, clip=True)


def _figure_cells(ax: Axes, cells: list[list[str]], by_block: Numbers, norm: Any, signed: bool) -> Any:
    """Heat map with its numbers: blank without a block, hatched if the interval includes zero."""
    values = np.array([[by_block.get(name, (np.nan,))[0] for name in row] for row in cells])
    values = values.reshape(len(cells), -1)
    two_sided = norm.vmin < 0
    image = ax.imshow(values, norm=norm, cmap=style.SIGNED if two_sided else style.MAP, aspect="auto")
    for i, row in enumerate(cells):
        for j, name in enumerate(row):
            if name not in by_block:
                continue
            value, low, high = by_block[name]
            depth = 2 * abs(float(norm(value)) - 0.5) if two_sided else float(norm(value))
            color = "white" if depth > 0.75 else "black"
            ax.text(j, i, blocks.cell_text(value), ha="center", va="center", fontsize=7, color=color)
            if signed and low <= 0 <= high and low < high:
                ax.fill_between(
                    [j - 0.5, j + 0.5],
                    i - 0.5,
                    i + 0.5,
                    facecolor="none",
                    hatch="////",
                    edgecolor="0.55",
                    lw=0,
                )
    ax.tick_params(length=0)
    ax.set_facecolor("0.96")
    for side in ax.spines.values():
        side.set_visible(False)
    return image


def _sharpness(result: Blocks) -> Figure:
    """λ_max of the sharpest blocks, in the order of the first operator."""
    import matplotlib.pyplot as plt

    order = next(iter(result.parts.values())).ranking()[:MOST_RANKED]
    series, outer = {}, {}
    for operator, part in result.parts.items():
        sharpness = [part.sharpness(name) for name in order]
        values = np.array([s.largest for s in sharpness])
        high = np.array([s.high for s in sharpness])
        series[TITLES[operator]] = values, values, np.where(np.isnan(high), values, high)
        numbers = [part.sampled_blocks.get(name) for name in order]
        outer[TITLES[operator]] = tuple(
            np.array([math.nan if n is None else getattr(n, end) for n in numbers]) for end in ("low", "high")
        )
    figure, ax = plt.subplots(figsize=(2.5 + 0.24 * len(order), 3.8), layout="constrained")
    blocks.bars(ax, order, series, label="λ_max of the block", outer=outer)
    return figure


def _extremes(result: Blocks) -> Figure:
    import matplotlib.pyplot as plt

    count = len(result.parts)
    figure, axes = plt.subplots(
        1, count, figsize=(6.2 * count, 3.8), layout="constrained", sharey=True, squeeze=False
    )
    values: list[float] = []
    for ax, (operator, part) in zip(axes[0], result.parts.items(), strict=True):
        pairs = list(part.extremes.values())
        ends = {"λ max": -1} | ({"λ min": 0} if all(len(pair.values) > 1 for pair in pairs) else {})
        series = {label: _ends(pairs, i) for label, i in ends.items()}
        values += [float(value) for middle, *_ in series.values() for value in middle]
        blocks.bars(ax, list(part.extremes), series, label="eigenvalue of the block", log=False)
        ax.set_title(TITLES[operator], fontsize=11)
    top = blocks.largest(values)
    smallest = min((abs(value) for value in values if abs(value) >= 1e-6 * top), default=top)
    axes[0, 0].set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(smallest)), linscale=0.7)
    axes[0, 0].set_ylim(3 * min(*values, 0.0), 3 * max(*values, smallest / 3))
    return figure


def _ends(pairs: list[Eigenpairs], i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Eigenvalue i of each block, and the ends of value ± residual."""
    values, residuals = (np.array([getattr(p, name)[i] for p in pairs]) for name in ("values", "residuals"))
    return values, values - residuals, values + residuals


def _figure_densities(result: Blocks) -> Figure:
    """One panel per block, all operators in it."""
    import matplotlib.pyplot as plt

    names = list(next(iter(result.parts.values())).densities)
    columns = min(len(names), PANELS_PER_ROW)
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(max(2.6 * columns, 5), 1.9 * rows + 0.5), layout="constrained", squeeze=False
    )
    for ax, name in zip(axes.flat, names, strict=False):
        for operator, part in result.parts.items():
            look = LOOKS[operator]
            ax.set_prop_cycle(color=[look.color], linestyle=[look.dash])
            part.densities[name].plot(ax, note=False)
        widths = ", ".join(f"{part.densities[name].width:.2g}" for part in result.parts.values())
        ax.set_title(f"{name} (width {widths})", fontsize=8)
        ax.set(xlabel="", ylabel="")
        ax.tick_params(labelsize=7)
        ax.locator_params(axis="x", nbins=4)
        ax.axvline(0, color="0.6", lw=0.5)  # after the curves, because the legend takes the first lines
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    figure.supxlabel("eigenvalue λ", fontsize=9)
    figure.supylabel("density of eigenvalues", fontsize=9)
    lines = axes.flat[0].lines[: len(result.parts)]
    figure.legend(
        lines,
        [TITLES[o] for o in result.parts],
        loc="outside upper right",
        ncols=3,
    )
    return figure


def _figure_heterogeneity(result: Blocks) -> Figure:
    import matplotlib.pyplot as plt

    parts = {o: p.heterogeneity for o, p in result.parts.items() if p.heterogeneity is not None}
    count = max(len(h.names) for h in parts.values())
    side = 2.0 + 0.32 * min(count, 30)
    figure, axes = plt.subplots(
        1, len(parts), figsize=(side * len(parts) + 1, side), layout="constrained", squeeze=False
    )
    top = max(float(h.divergence.max()) for h in parts.values()) or 1.0
    image = None
    for ax, (operator, h) in zip(axes[0], parts.items(), strict=True):
        image = ax.imshow(h.divergence, vmin=0, vmax=top, cmap=style.MAP, interpolation="nearest")
        small = 8 if count <= 20 else 6
        ax.set_xticks(range(count), h.names, rotation=90, fontsize=small)
        ax.set_yticks(range(count), h.names, fontsize=small)
        ax.set_title(TITLES[operator], fontsize=11)
        if count <= 14:
            for (i, j), value in np.ndenumerate(h.divergence):
                color = style.ink_at(image, value)
                ax.text(j, i, blocks.cell_text(value), ha="center", va="center", fontsize=6, color=color)
    if image is not None:
        figure.colorbar(image, ax=list(axes[0]), label="Jensen–Shannon divergence (bits)", shrink=0.9)
    return figure


# ----------------------------------------------------------------------------------------------------- scenes

QUANTITIES = {"norm": "‖·‖_F", "trace": "trace", "λ_max": "λ_max", "rms": "root mean square entry"}


def scenes(result: Blocks) -> dict[str, Scene]:
    """Interactive figures: the map of blocks; densities and divergences if measured."""
    made = {"block_map": _map(result)}
    first = next(iter(result.parts.values()))
    if first.densities:
        made["densities"] = _scene_densities(result)
    if first.heterogeneity is not None:
        made["heterogeneity"] = _scene_heterogeneity(result)
    return made


def _map(result: Blocks) -> Scene:
    """Interactive map, layers × roles, of every quantity that some matrix has."""
    matrices = {CHOICES[name]: name for name in result.parts}
    size = dict(zip(result.names, result.sizes.tolist(), strict=True))
    rows = {q: [name for name in size if _is_known(result, q, name)] for q in QUANTITIES}
    known = [q for q in QUANTITIES if rows[q]]

    def draw(matrix: str, quantity: str) -> Scene:
        name = matrices[matrix]
        cells = _scene_cells(result.parts[name], quantity, size)
        colors = "signed" if quantity in ("trace", "λ_max") else "log"
        label = f"{QUANTITIES[quantity]}, {TITLES[name]}"
        return layer_map(cells, label=label, colors=colors, names=rows[quantity])

    return switched({"matrix": list(matrices), "quantity": known}, draw)


def _is_known(result: Blocks, quantity: str, name: str) -> bool:
    """Return True if some matrix has the quantity of a block."""
    return any(math.isfinite(_number(part, quantity, name, 1).value) for part in result.parts.values())


def _scene_cells(part: Part, quantity: str, size: dict[str, int]) -> dict[str, Cell]:
    cells = {name: _number(part, quantity, name, size[name]) for name in size}
    return {name: cell for name, cell in cells.items() if math.isfinite(cell.value)}


def _number(part: Part, quantity: str, name: str, size: int) -> Cell:
    """Quantity of a block with its error or its interval; nan if it was not measured."""
    value, error, ends, more = math.nan, math.nan, (math.nan, math.nan), ""
    if quantity == "trace":
        value, _, probes = part.trace_of(name)
        ends = part.trace_interval(name)
        more = f"<br>{'exact' if probes == 'exact' else f'from {probes} probes'}"
        more += "<br>not told apart from zero" if part.is_noise(name) else ""
    elif quantity == "λ_max":
        sharpness = part.sharpness(name)
        value, error = sharpness.largest, sharpness.error
        more = (
            f"<br>at most {bound(sharpness.high, up=True)}, 95 times in 100"
            if math.isfinite(sharpness.high)
            else ""
        )
    elif name in part.norms:
        scale = size if quantity == "rms" else 1
        own = part.norms[name]
        value, ends = own.norm / scale, (own.norm_low / scale, own.norm_high / scale)
    number = said(value, error) if quantity == "λ_max" else in_interval(value, *ends)
    text = f"<b>{name}</b><br>{QUANTITIES[quantity]}: {number}{more}<br>{size:,} parameters"
    return Cell(value, text)


def _scene_densities(result: Blocks) -> Scene:
    """Interactive densities: all matrices of one block at a time."""
    names = list(next(iter(result.parts.values())).densities)
    made = {
        name: spectra([
            shape(operator, part.densities[name], part.extremes.get(name))
            for operator, part in result.parts.items()
            if name in part.densities
        ])
        for name in names
    }  # fmt: skip
    inner = made[names[0]]["controls"]
    variants = {f"{name}|{key}": v for name, scene in made.items() for key, v in scene["variants"].items()}
    first = next(iter(variants.values()))
    controls = [{"name": "block", "choices": names}, *inner]
    return {**first, "controls": controls, "variants": variants, "caption": density_scene(result)}


def _scene_heterogeneity(result: Blocks) -> Scene:
    """Interactive map of the divergence of every pair of blocks, from 0 to 1."""
    parts = {CHOICES[o]: p.heterogeneity for o, p in result.parts.items() if p.heterogeneity is not None}

    def draw(matrix: str) -> Scene:
        h = parts[matrix]
        cells = [
            [
                Cell(float(h.divergence[i, j]), f"<b>{a}, {b}</b><br>divergence: "
                     f"{said(float(h.divergence[i, j]), float(h.stderr[i, j]))} bits")
                for j, b in enumerate(h.names)
            ]
            for i, a in enumerate(h.names)
        ]  # fmt: skip
        symbol = next(MATRIX_SYMBOLS[o] for o, choice in CHOICES.items() if choice == matrix)
        label = f"Jensen–Shannon divergence (bits), {symbol}"
        top = max(float(own.divergence.max()) for own in parts.values()) or 1.0
        return grid_map(h.names, h.names, cells, label=label, colors="linear", limits=(0.0, top))

    return switched({"matrix": list(parts)}, draw)
