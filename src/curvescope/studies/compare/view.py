"""Tables, figures and captions of the study `compare`."""

from __future__ import annotations

import math
import re
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.number_format import MAX_DIGITS, plural, rounded, to_error
from curvescope.runs.study_result import Line, Tables
from curvescope.studies.compare.study import EQUAL, LARGER, OF_BLOCKS, OPEN, QUANTITIES, SMALLER, Estimate
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE, bars, cell_text
from curvescope.viz.spectrum import density

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.compare.study import Comparison

Row = dict[str, object]


def tables(found: Comparison) -> Tables:
    """Return differences, values of every side, blocks, and unmatched blocks."""
    rows = {"differences": _differences(found), "sides": _sides(found), "blocks": _blocks(found)}
    rows["without_partner"] = [
        {"block": block, "only in": side} for side, names in found.alone.items() for block in names
    ]
    return {name: each for name, each in rows.items() if each}


def _differences(found: Comparison) -> list[Row]:
    first, rows = found.sides[0], []
    for number, side in enumerate(found.sides[1:], start=1):
        for name in QUANTITIES:
            difference, ratio = found.difference(number, name), found.ratio(number, name)
            rows.append(
                {
                    "quantity": name,
                    "side": side.name,
                    **_with_ends("value", side.quantity(name)),
                    "against": first.name,
                    **_with_ends("its value", first.quantity(name)),
                    "difference": difference.value,
                    "low": difference.low,
                    "high": difference.high,
                    "verdict": difference.verdict,
                    **_with_ends("ratio", ratio),
                }
            )
    return rows


def _with_ends(name: str, found: Estimate) -> Row:
    return {name: found.value, f"{name} low": found.low, f"{name} high": found.high}


def _sides(found: Comparison) -> list[Row]:
    return [
        {
            "side": side.name,
            "model": side.model,
            "data": side.data,
            "terms": side.num_terms,
            "parameters": side.num_parameters,
            "quantity": name,
            **side.quantity(name)._asdict(),
        }
        for side in found.sides
        for name in QUANTITIES
    ]


def _blocks(found: Comparison) -> list[Row]:
    """Return ratios per block, λ_max first."""
    sizes = [dict(zip(side.blocks, side.sizes.tolist(), strict=True)) for side in found.sides]
    rows = []
    for name, (number, side), block in product(OF_BLOCKS, list(enumerate(found.sides))[1:], found.blocks):
        ratio = found.ratio(number, name, block)
        rows.append(
            {
                "block": block,
                "parameters": sizes[number][block],
                "quantity": name,
                "side": side.name,
                **_with_ends("value", side.quantity(name, block)),
                "against": found.sides[0].name,
                **_with_ends("its value", found.sides[0].quantity(name, block)),
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "verdict": found.difference(number, name, block).verdict,
            }
        )
    return rows


LAYER = re.compile(r"L(\d+)\.(.+)")
IN_A_ROW = 5
NEAR_ZERO = 1e-3  # share of the largest eigenvalue below which the axis of a density is linear
LEAST_FOLD = 10.0  # smallest range of the color scale of a ratio


def figures(found: Comparison) -> dict[str, Figure]:
    """Draw quantities, densities, and blocks if there are any."""
    figures = {"quantities": _quantities(found)}
    if all(side.whole.densities for side in found.sides):
        figures["density"] = _densities(found)
    if found.blocks:
        figures["block_ratios"] = _ratios(found)
        figures["block_sharpness"] = _sharpness(found)
    return figures


def _color(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _quantities(found: Comparison) -> Figure:
    """Draw a panel for every quantity, with a point and its interval for every side."""
    height = 1.25 + 0.35 * len(found.sides)
    figure, axes = style.panels(len(QUANTITIES), IN_A_ROW, (2.4, height), sharey=True)
    for ax, name in zip(axes, QUANTITIES, strict=True):
        for number, side in enumerate(found.sides):
            value, low, high = side.quantity(name)
            error = style.error_bars([value], [low], [high])
            ax.errorbar([value], [number], xerr=error, fmt="o", ms=5, capsize=3, color=_color(number))
        ax.set_title(name)
        ax.set_yticks(range(len(found.sides)), [side.name for side in found.sides])
        ax.set_ylim(len(found.sides) - 0.5, -0.5)
        ax.margins(x=0.15)
        ax.locator_params(axis="x", nbins=4)
        ax.grid(axis="x", lw=0.3, color="0.9")
    return figure


def _densities(found: Comparison) -> Figure:
    """Draw densities of the Hessians and GGNs of all sides, one panel each."""
    figure, axes = style.subplots(1, 2, figsize=(11, 3.8), sharey=True)
    for ax, part, title in zip(axes, ("hessian", "ggn"), ("Hessian", "GGN"), strict=True):
        ends = [abs(end) for side in found.sides for end in side.whole.densities[part].extremes]
        for number, side in enumerate(found.sides):
            ax.set_prop_cycle(color=[_color(number)])
            density(ax, *side.whole.densities[part].band(), log_y=True, label=side.name)
        _both_sides(ax, max(ends) or 1.0)
        if part == "ggn":
            ax.set_xlim(left=0.0)
        ax.set_title(title)
    axes[1].set_ylabel("")
    return figure


def _both_sides(ax: Axes, end: float) -> None:
    """Set an axis that is logarithmic on both sides of zero and linear near it, with few ticks."""
    left, right = ax.get_xlim()
    ax.set_xscale("symlog", linthresh=NEAR_ZERO * end)
    powers = 10.0 ** np.arange(math.floor(math.log10(end)) - 1, math.floor(math.log10(end)) + 1)
    ax.set_xticks([power for power in (*-powers[::-1], 0.0, *powers) if left <= power <= right])
    ax.set_xlim(left, right)


def _ratios(found: Comparison) -> Figure:
    """Draw layer × role maps of norms relative to the first side, a row for every other side."""
    inside = [match for name in found.blocks if (match := LAYER.fullmatch(name))]
    layers = sorted({int(match[1]) for match in inside})
    roles = list(dict.fromkeys(match[2] for match in inside))
    outside = [name for name in found.blocks if not LAYER.fullmatch(name)]
    cells = [[f"L{layer}.{role}" for role in roles] for layer in layers]
    grids = [grid for grid in (cells, [outside]) if grid and grid[0]]
    rows, wide = len(found.sides) - 1, [max(len(grid[0]), 1) for grid in grids]
    size = (max(5.5, 2.6 + 0.75 * sum(wide)), (1.3 + 0.3 * max(len(layers), 2)) * rows)
    fold = _figure_fold(found)
    figure, axes = style.subplots(rows, len(grids), figsize=size, width_ratios=wide, squeeze=False)
    for number, row in enumerate(axes, start=1):
        for ax, grid in zip(row, grids, strict=True):
            _cells(ax, found, number, grid, fold)
            ax.set_xticks(range(len(grid[0])), [_role(name) for name in grid[0]])
        title = f"‖H_bb‖ of {found.sides[number].name} over {found.sides[0].name}"
        row[0].set_title(title)
        figure.colorbar(row[0].images[0], ax=list(row), label="ratio", pad=0.01, aspect=12)
    return figure


def _figure_fold(found: Comparison) -> float:
    """Range of the color scale: the largest change, up or down."""
    others = range(1, len(found.sides))
    values = np.array([found.ratio(i, "‖H‖_F", block).value for i in others for block in found.blocks])
    known = values[np.isfinite(values) & (values > 0)]
    return float(max(LEAST_FOLD, np.maximum(known, 1 / known).max(initial=1.0)))


def _role(name: str) -> str:
    match = LAYER.fullmatch(name)
    return match[2] if match else name


def _cells(ax: Axes, found: Comparison, number: int, grid: list[list[str]], fold: float) -> None:
    """Draw one map with the ratio in every cell, blank if there is no block."""
    from matplotlib.colors import LogNorm

    there = set(found.blocks)
    values = np.array(
        [[found.ratio(number, "‖H‖_F", b).value if b in there else math.nan for b in row] for row in grid]
    )
    norm = LogNorm(1 / fold, fold, clip=True)
    ax.imshow(np.ma.masked_invalid(values), norm=norm, cmap=style.SIGNED, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        block = grid[i][j]
        if block not in there:
            continue
        text = cell_text(float(f"{value:.2g}")) if math.isfinite(value) else "–"
        text = f"({text})" if found.difference(number, "‖H‖_F", block).verdict == OPEN else text
        dark = math.isfinite(value) and abs(2 * norm(value) - 1) > 0.6
        ax.text(j, i, text, ha="center", va="center", color="white" if dark else "black")
    layered = LAYER.fullmatch(grid[0][0])
    words = [row[0].split(".")[0] for row in grid] if layered else []
    ax.set_yticks(range(len(words)), words)
    ax.tick_params(length=0)


def _sharpness(found: Comparison) -> Figure:
    """Draw λ_max of every block for all sides."""
    figure, ax = style.subplots(figsize=(max(5.0, 2.5 + 0.3 * len(found.blocks)), 3.6))
    series = {
        side.name: tuple(np.array([side.quantity("λ_max", block) for block in found.blocks]).T)
        for side in found.sides
    }
    bars(ax, found.blocks, series, label="λ_max of the block")  # pyright: ignore[reportArgumentType]
    return figure


WIDEST = 2.0  # sentences give a ratio if the ends of its interval differ by less than this factor


def summary(found: Comparison) -> list[Line]:
    """Return every quantity of every side against the first."""
    first, lines = found.sides[0], []
    for number, side in enumerate(found.sides[1:], start=1):
        for name in QUANTITIES:
            before, after = _shown(first.quantity(name)), _shown(side.quantity(name))
            label = name if len(found.sides) == 2 else f"{name}, {side.name}"
            words = changed(found.difference(number, name), found.ratio(number, name))
            lines.append((label, f"{before} → {after}", words))
    return lines


def _shown(found: Estimate) -> str:
    return to_error(found.value, found.error)


def changed(difference: Estimate, ratio: Estimate) -> str:
    """Describe a difference, such as `larger by 3.2 (2.9 to 3.6), 2.1-fold`."""
    if difference.verdict == EQUAL:
        return EQUAL
    interval = f"{rounded(difference.low, 3)} to {rounded(difference.high, 3)}"
    if difference.verdict == OPEN:
        return f"not decided: the difference is within {interval}"
    fold = f", {_caption_fold(ratio.value, 3)}" if _is_known(ratio) else ""
    if rounded(difference.low, 3) == rounded(difference.high, 3):
        return f"{difference.verdict} by {rounded(abs(difference.value), 3)}{fold}"
    return f"{difference.verdict}: the difference is within {interval}{fold}"


def _is_known(ratio: Estimate) -> bool:
    """Return True if a ratio is precise enough to be stated in a sentence."""
    return ratio.value > 0 and ratio.low > 0 and ratio.high <= WIDEST * ratio.low


def opening(found: Comparison) -> str:
    """Return one sentence for every side but the first."""
    return " ".join(_sentence(found, number) for number in range(1, len(found.sides)))


def _sentence(found: Comparison, number: int) -> str:
    verdicts = {name: found.difference(number, name).verdict for name in QUANTITIES}
    sides = f"{found.sides[number].name} against {found.sides[0].name}"
    if set(verdicts.values()) == {EQUAL}:
        return f"{sides}: all {len(verdicts)} quantities are equal."
    parts = []
    for verdict in (LARGER, SMALLER, EQUAL, OPEN):
        names = [_folded(found, number, name) for name, word in verdicts.items() if word == verdict]
        if names:
            parts.append(f"{verdict}: {', '.join(names)}")
    return f"{sides}: {'; '.join(parts)}."


def _folded(found: Comparison, number: int, name: str) -> str:
    difference, ratio = found.difference(number, name), found.ratio(number, name)
    decided = difference.verdict in (LARGER, SMALLER)
    return f"{name} ({_caption_fold(ratio.value, 2)})" if decided and _is_known(ratio) else name


def _caption_fold(ratio: float, digits: int) -> str:
    """Format a ratio such as `2.1-fold`, with enough digits to differ from one."""
    texts = [rounded(ratio, count) for count in range(digits, MAX_DIGITS + 1)]
    return f"{next((text for text in texts if text.rstrip('0') != '1.'), texts[-1])}-fold"


def captions(found: Comparison) -> dict[str, str]:
    """Return a caption for each figure and table."""
    first = found.sides[0]
    probes = plural(len(first.whole.hessian.trace_samples), "probe")
    exact = first.whole.hessian.exact
    how = "exact, from the whole matrix" if exact else f"from {probes} and Lanczos, the same for every side"
    return {
        "quantities": f"Every quantity of every side, {how}; bars are 95 % intervals "
        "on these data (numerical). The functional share is ‖H_f‖/‖H‖, the λ_max gap is "
        "1 − λ_max(H_o)/λ_max(H).",
        "density": "Spectral densities of the Hessian and of the GGN, by stochastic Lanczos quadrature, "
        "smoothed by a kernel; bands are 95 % intervals over probes. The axis is logarithmic on both "
        "sides of 0.",
        "block_ratios": "Frobenius norm of every diagonal block of the Hessian divided by that of "
        f"{first.name}, by layer and role; in parentheses if it is not decided which is larger.",
        "block_sharpness": "λ_max of every block on every side; bars are intervals.",
        "differences": f"Every quantity minus that of {first.name}, with the 95 % interval of the "
        "difference, which includes the sampling error if that was measured (see the notes); it is decided "
        "if the interval excludes zero. Ratios of positive quantities with their intervals.",
        "sides": "The quantities of every side, with their numerical 95 % intervals.",
        "blocks": f"Diagonal blocks of the Hessian against those of {first.name}: values, ratios with "
        "their intervals, and if it is decided which is larger.",
        "without_partner": "Blocks that are missing on a side; they are not compared.",
    }
