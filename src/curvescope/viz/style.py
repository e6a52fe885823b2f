"""Style of all figures: colors by name, markers, dashes, and settings for custom figures.

    with cs.viz.style.context():
        figure, ax = plt.subplots()
        ax.plot(x, y, **cs.viz.style.line("ggn"))

Every hue has a different lightness, so that lines also differ in grayscale and for color-blind readers. A
named quantity has the same color, dash and marker in all figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import LegendLocType

BLUE, ORANGE, TEAL, PLUM, GOLD = PALETTE = ("#1565a8", "#d1591b", "#37a791", "#6b2c5f", "#d8a900")
GRAY = "#808080"  # for baselines; visible on light and dark backgrounds
SKY, PINK = "#8cc4e8", "#d1608f"
MANY = (*PALETTE, GRAY, SKY, PINK)
"""Colors for items that also differ by marker or position: more than five hues are not distinct in grayscale.
"""
LIGHTER = {BLUE: "#2f86d6", PLUM: "#b07aa8"}
"""Colors too dark for a dark page, with their replacements in scenes."""
ON_SCREEN = (LIGHTER[BLUE], ORANGE, TEAL, GOLD, LIGHTER[PLUM], GRAY)
"""Colors of scenes, visible on light and dark pages."""
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
MARKS = ("o", "s", "^", "D", "v")
MAP, SIGNED = "YlOrRd", "RdBu_r"
"""Names in matplotlib of the two color maps below."""
SEQUENTIAL = (
    "#ffffcc", "#ffeda0", "#fed976", "#feb24c", "#fd8d3c", "#fc4e2a", "#e31a1c", "#bd0026", "#800026",
)  # fmt: skip
"""Color map `MAP` from light to dark, for quantities without sign."""
DIVERGING = (
    "#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d",
    "#b2182b", "#67001f",
)  # fmt: skip
"""Color map `SIGNED`, blue below zero and red above, for signed quantities."""


SUBSCRIPT = re.compile(r"(λ|‖)_(max|min|F)\b")
TEX = {"λ": r"\lambda", "‖": r"\|"}


class Look(NamedTuple):
    """Color, dash and mark of one quantity in all figures."""

    color: str
    dash: Any  # in matplotlib's format
    mark: str


LOOKS = {
    "hessian": Look(BLUE, "-", "o"),
    "ggn": Look(ORANGE, "--", "s"),
    "functional": Look(TEAL, ":", "^"),
    "loss": Look("#000000", "-", "o"),  # the page replaces black by its text color
    "quadratic": Look(BLUE, "--", "s"),
    "cubic": Look(ORANGE, ":", "^"),
}
"""Looks by name: the matrices H, H_o and H_f, and the loss with its Taylor polynomials."""


def line(name: str) -> dict[str, Any]:
    """Return the arguments of `ax.plot` for a name of `LOOKS`."""
    look = LOOKS[name]
    return {"color": look.color, "ls": look.dash, "marker": look.mark}


def look(number: int) -> Look:
    """Look of the curve with this number, if it has no name of its own; hue, dash and mark differ."""
    return Look(MANY[number % len(MANY)], DASHES[number % len(DASHES)], MARKS[number % len(MARKS)])


def on_screen(color: str) -> str:
    """Return the variant of a color for scenes, visible on light and dark backgrounds."""
    return LIGHTER.get(color, color)


def ink(color: Sequence[float]) -> str:
    """Return black or white, whichever is readable on a color (r, g, b, …) between 0 and 1."""
    return "white" if 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] < 0.5 else "black"


def ink_at(image: Any, value: float) -> str:
    """Color of text that is readable on the color of a value in `ax.imshow`; black for missing values."""
    return ink(image.cmap(image.norm(value))) if math.isfinite(value) else "black"


def write_cells(
    ax: Axes, words: Callable[[float], str], *, size: float = 8, missing: str | None = None
) -> None:
    """Write `words` of its value into each cell of the image; cells without a value get `missing`."""
    image = ax.images[-1]
    values: Any = image.get_array()
    for (i, j), value in np.ndenumerate(np.ma.filled(np.ma.masked_invalid(values).astype(float), math.nan)):
        text = words(float(value)) if math.isfinite(value) else missing
        if text is not None:
            color = ink_at(image, float(value))
            ax.text(j, i, text, ha="center", va="center", fontsize=size, color=color)


def fitting(count: int) -> dict[str, Any]:
    """Return the size of `count` names along an axis: that of ticks, or smaller if they are many."""
    return {"fontsize": 8 if count <= 20 else 6 if count <= 60 else 5}


def settings() -> dict[str, Any]:
    """Return matplotlib's settings for our figures, as in a style file."""
    return {
        "font.size": 8,
        "figure.titlesize": 11,
        "figure.labelsize": 9,
        "axes.prop_cycle": f"cycler(color={list(MANY)})",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 9.5,
        "axes.labelsize": 9,
        "axes.axisbelow": True,
        "grid.color": "0.9",
        "grid.linewidth": 0.3,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "lines.linewidth": 1.4,
        "lines.markersize": 3.5,
        "image.interpolation": "nearest",
        "savefig.dpi": 150,
    }


@contextmanager
def context() -> Iterator[None]:
    """Use our style for figures created inside the context."""
    import matplotlib as mpl

    with mpl.rc_context(settings()):  # pyright: ignore[reportArgumentType]
        yield


def use() -> None:
    """Use our style for all figures from now on."""
    import matplotlib as mpl

    mpl.rcParams.update(settings())  # pyright: ignore[reportArgumentType, reportCallIssue]


P = ParamSpec("P")
R = TypeVar("R")


def in_style(draw: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function that draws into axes so that titles, ticks and legends have our style."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> R:
        with context():
            result = draw(*args, **kwargs)
            axes = getattr(result, "axes", [])
            for ax in axes if isinstance(axes, list) else [axes]:
                _pin(ax)
        return result

    return drawn


def styled(draw: Callable[P, Mapping[str, Figure]]) -> Callable[P, dict[str, Figure]]:
    """Wrap `draw` so that its figures keep our style wherever they are saved or shown."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> dict[str, Figure]:
        with context():
            figures = dict(draw(*args, **kwargs))
            for figure in figures.values():
                for ax in figure.axes:
                    _pin(ax)
                _set_symbols(figure)
        return figures

    return drawn


def symbols(text: str) -> str:
    """Convert subscripts to matplotlib's mathematics: λ_max to $\\lambda_{\\mathrm{max}}$."""
    if "$" in text:  # contains mathematics already, or is a token
        return text
    return SUBSCRIPT.sub(lambda found: f"${TEX[found[1]]}_{{\\mathrm{{{found[2]}}}}}$", text)


def _set_symbols(figure: Figure) -> None:
    """Convert symbols in titles, labels, legends and notes; ticks are created only when a figure is drawn."""
    legends = [one for one in (*figure.legends, *(ax.get_legend() for ax in figure.axes)) if one]
    texts = [*figure.texts, *(text for legend in legends for text in legend.get_texts())]
    for ax in figure.axes:
        texts += [ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label, *ax.texts]  # pyright: ignore[reportAttributeAccessIssue]
    for one in texts:
        if SUBSCRIPT.search(one.get_text()):
            one.set_text(symbols(one.get_text()))


def subplots(rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Return a figure and its axes, as from `plt.subplots`, with a layout without overlaps."""
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, **{"layout": "constrained", **options})


def panels(count: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` axes of this size in inches, in rows of at most `columns`."""
    columns = min(columns, count)
    rows = -(-count // columns)
    whole = (size[0] * columns, size[1] * rows)
    figure, axes = subplots(rows, columns, figsize=whole, squeeze=False, **options)
    for ax in axes.flat[count:]:
        ax.remove()
    return figure, list(axes.flat[:count])


def shared_legend(figure: Figure, ax: Axes, *, loc: LegendLocType, ncols: int = 1) -> None:
    """Draw the legend of one of the axes once for the figure, outside of all axes."""
    figure.legend(*ax.get_legend_handles_labels(), loc=loc, ncols=ncols)


def line_of_agreement(ax: Axes) -> None:
    """Draw the line y = x and y = 0 behind the points, with few ticks."""
    low, high = ax.get_xlim()
    ax.axline((0, 0), slope=1, color="0.5", lw=0.7)
    ax.axhline(0, color="0.85", lw=0.6, zorder=0)
    ax.set_xlim(low, high)
    ax.locator_params(nbins=5)
    ax.ticklabel_format(style="sci", scilimits=(-2, 3), useMathText=True)


def error_bars(values: Any, low: Any, high: Any) -> np.ndarray:
    """Return the lengths of error bars below and above values, zero if an end is unknown: (2, …)."""
    middle = np.asarray(values)
    ends = np.stack([middle - np.asarray(low), np.asarray(high) - middle])
    return np.nan_to_num(np.maximum(ends, 0.0), nan=0.0, posinf=0.0)


def axes(size: tuple[float, float]) -> Axes:
    """Return axes in a new figure of this size in inches, with our style."""
    with context():
        ax = subplots(figsize=size)[1]
        _pin(ax)
    return ax


def _pin(ax: Axes) -> None:
    """Fix the tick labels now; otherwise matplotlib would create them when the figure is drawn."""
    for which in ("x", "y"):
        axis = ax.xaxis if which == "x" else ax.yaxis
        if "labelsize" not in axis.get_tick_params():
            ax.tick_params(axis=which, labelsize=settings()[f"{which}tick.labelsize"])


FEW_DECADES = 2.0
SHORT = 300.0  # below this range, powers of ten would give only one or two labels


def plain_numbers(ax: Axes) -> None:
    """Put ticks at 1, 2, 5 · 10ⁿ, written 0.02 and 50, on a logarithmic y axis of few decades.

    Call it after everything is drawn: it fixes the range of the axis.
    """
    low, high = ax.get_ylim()
    if not 0 < low < high or high / low > SHORT:
        return
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_yticks([], minor=True)
    ax.set_ylim(low, high)


def around_zero(ax: Axes, linear: float) -> None:
    """Make the y axis linear up to `linear`, a power of ten, and logarithmic beyond, with plain numbers.
    Ticks are 0 and powers of ten of both signs, with some between them for few decades, or equal steps if
    the axis is all linear. Call it after everything is drawn: it fixes the range.
    """
    from matplotlib.ticker import MaxNLocator

    ax.set_yscale("symlog", linthresh=linear)
    low, high = ax.get_ylim()
    decades = [max(math.log10(max(end, linear) / linear), 0.0) for end in (-low, high)]
    few = sum(decades) <= FEW_DECADES
    several, half = ((1, 2, 5), [linear / 2]) if few else ((1,), [])
    sizes = half + [m * linear * 10.0**e for e in range(math.ceil(max(decades)) + 1) for m in several]
    ticks = [0.0, *sizes, *(-size for size in sizes)]
    if not any(decades):
        ticks = [float(tick) for tick in MaxNLocator(5).tick_values(low, high)]
    inside = sorted(tick for tick in ticks if low <= tick <= high)
    ax.set_yticks(inside, [f"{tick:g}" for tick in inside])
    ax.set_yticks([], minor=True)
    ax.set_ylim(low, high)
