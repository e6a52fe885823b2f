"""The look of all figures: colors by name, marks, dashes, and settings for figures of one's own.

    with cs.viz.style.context():
        figure, ax = plt.subplots()
        ax.plot(x, y, **cs.viz.style.line("ggn"))

Every hue has a lightness of its own, so that lines differ in gray too, and stay apart for people who do not
see red, green or blue as others do. What has a name keeps its color, dash and mark everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, TEAL, PLUM, GOLD = PALETTE = ("#1565a8", "#d1591b", "#37a791", "#6b2c5f", "#d8a900")
GRAY = "#808080"  # of what is compared with; it is seen on light and on dark ground
SKY, PINK = "#8cc4e8", "#d1608f"
MANY = (*PALETTE, GRAY, SKY, PINK)
"""Of things that marks or places tell apart as well: beyond five, hues alone do not in gray."""
LIGHTER = {BLUE: "#2f86d6", PLUM: "#b07aa8"}
"""What is too dark for a dark page, and how scenes show it."""
ON_SCREEN = (LIGHTER[BLUE], ORANGE, TEAL, GOLD, LIGHTER[PLUM], GRAY)
"""Of scenes, which light and dark pages show alike."""
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
MARKS = ("o", "s", "^", "D", "v")
MAP, SIGNED = "YlOrRd", "RdBu_r"
"""matplotlib's names of the two scales of colors below."""
SEQUENTIAL = (
    "#ffffcc",
    "#ffeda0",
    "#fed976",
    "#feb24c",
    "#fd8d3c",
    "#fc4e2a",
    "#e31a1c",
    "#bd0026",
    "#800026",
)
"""Light to dark, `MAP`: quantities without a sign."""
DIVERGING = (
    "#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d",
    "#b2182b", "#67001f",
)  # fmt: skip
"""Blue below zero, red above, `SIGNED`: quantities with a sign."""


SUBSCRIPT = re.compile(r"(λ|‖)_(max|min|F)\b")
TEX = {"λ": r"\lambda", "‖": r"\|"}


class Look(NamedTuple):
    """How one thing is drawn everywhere."""

    color: str
    dash: Any  # as matplotlib takes it
    mark: str


LOOKS = {
    "hessian": Look(BLUE, "-", "o"),
    "ggn": Look(ORANGE, "--", "s"),
    "functional": Look(TEAL, ":", "^"),
    "loss": Look("#000000", "-", "o"),  # the page draws black in the color of its ink
    "quadratic": Look(BLUE, "--", "s"),
    "cubic": Look(ORANGE, ":", "^"),
}
"""By name: the matrices H, H_o and H_f, and the loss with its Taylor polynomials."""


def line(name: str) -> dict[str, Any]:
    """What `ax.plot` needs to draw a thing of `LOOKS` as we do."""
    look = LOOKS[name]
    return {"color": look.color, "ls": look.dash, "marker": look.mark}


def look(number: int) -> Look:
    """Of the curve with this number, where it has no name of its own: hue, dash and mark differ."""
    return Look(MANY[number % len(MANY)], DASHES[number % len(DASHES)], MARKS[number % len(MARKS)])


def on_screen(color: str) -> str:
    """A color as scenes show it, seen on light and on dark ground."""
    return LIGHTER.get(color, color)


def ink(color: Sequence[float]) -> str:
    """Black or white, what is read on a color (r, g, b, …) between 0 and 1."""
    return "white" if 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] < 0.5 else "black"


def ink_at(image: Any, value: float) -> str:
    """What is read on the color that a map (`ax.imshow`) gives to a value; black where it has none."""
    return ink(image.cmap(image.norm(value))) if math.isfinite(value) else "black"


def settings() -> dict[str, Any]:
    """matplotlib's settings of our figures, as in a style file."""
    return {
        "axes.prop_cycle": f"cycler(color={list(MANY)})",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
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
    """Figures that are made inside have our look; outside nothing changes."""
    import matplotlib as mpl

    with mpl.rc_context(settings()):  # pyright: ignore[reportArgumentType]
        yield


def use() -> None:
    """Our look for all figures from here on."""
    import matplotlib as mpl

    mpl.rcParams.update(settings())  # pyright: ignore[reportArgumentType, reportCallIssue]


P = ParamSpec("P")


def styled(draw: Callable[P, Mapping[str, Figure]]) -> Callable[P, dict[str, Figure]]:
    """`draw` with our look, wherever its figures are saved or shown afterwards."""

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
    """Subscripts of words as matplotlib sets them: λ_max to $\\lambda_{\\mathrm{max}}$."""
    if "$" in text:  # set already, or a token
        return text
    return SUBSCRIPT.sub(lambda found: f"${TEX[found[1]]}_{{\\mathrm{{{found[2]}}}}}$", text)


def _set_symbols(figure: Figure) -> None:
    """In titles, labels, legends and notes; ticks are written when a figure is drawn."""
    legends = [one for one in (*figure.legends, *(ax.get_legend() for ax in figure.axes)) if one]
    texts = [*figure.texts, *(text for legend in legends for text in legend.get_texts())]
    for ax in figure.axes:
        texts += [ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label, *ax.texts]  # pyright: ignore[reportAttributeAccessIssue]
    for one in texts:
        if SUBSCRIPT.search(one.get_text()):
            one.set_text(symbols(one.get_text()))


def axes(size: tuple[float, float]) -> Axes:
    """Axes of a figure of their own, in inches, with our look."""
    import matplotlib.pyplot as plt

    with context():
        ax = plt.subplots(figsize=size, layout="constrained")[1]
        _pin(ax)
    return ax


def _pin(ax: Axes) -> None:
    """Ticks are made when a figure is drawn: what they would read then is written down now."""
    for which in ("x", "y"):
        axis = ax.xaxis if which == "x" else ax.yaxis
        if "labelsize" not in axis.get_tick_params():
            ax.tick_params(axis=which, labelsize=settings()[f"{which}tick.labelsize"])


FEW_DECADES = 2.0
SHORT = 300.0  # the range of an axis that powers of ten alone would leave with one or two labels


def plain_numbers(ax: Axes) -> None:
    """Where the logarithmic y axis spans few decades, ticks at 1, 2, 5 · 10ⁿ, written 0.02 and 50.

    To be called when everything is drawn: the range of the axis stays as it is.
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
    """A y axis that is linear up to `linear`, a power of ten, and logarithmic beyond, with plain numbers.

    Ticks are 0 and powers of ten of both signs, and some between them where there are few decades; where all
    is linear, a few equal steps. To be called when everything is drawn: the range stays as it is.
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
