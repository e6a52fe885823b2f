"""The figures of the study `sinks`."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from curvescope.studies.sinks.effects import Quantity, effect
from curvescope.studies.sinks.tables import all_ways
from curvescope.studies.sinks.ways import HOWS, UNCHANGED
from curvescope.viz import style
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.sinks.study import Sinks

ROWS: tuple[tuple[str, tuple[Quantity, ...]], ...] = (
    ("λ_max, times", ("lambda_max", "ggn_lambda_max")),
    ("bulk width, times", ("bulk_width",)),
    ("outliers, times", ("outliers",)),
)
DENSE = 1.2  # decades that have room for three labels each
ASIDE = 0.022  # of an axis: from text to text at one strength
NUMBERED = 12  # rows and columns of a map that fit a number in each cell


def draw(result: Sinks) -> dict[str, Figure]:
    """By name; what was not measured is left out."""
    found = {"spectra": _spectra(result)} if result.ways else {}
    if result.heads.mass.size:
        found["heads"] = _heads(result)
    if len(result.blocks) > 1:
        found["blocks"] = _blocks(result)
    return found


def _spectra(result: Sinks) -> Figure:
    import matplotlib.pyplot as plt

    hows = list(dict.fromkeys(result.hows))
    size = (1.4 + max(1.95 * len(hows), 3.0), 6.6)
    figure, axes = plt.subplots(3, len(hows), figsize=size, sharey="row", squeeze=False, layout="constrained")
    for column, how in enumerate(hows):
        ways = [way for way in all_ways(result) if way.how == how]
        names, strengths = [way.name for way in ways], [way.strength for way in ways]
        for row, (label, quantities) in enumerate(ROWS):
            ax = axes[row][column]
            for i, quantity in enumerate(quantities):
                _follow(ax, result, names, quantity, color=PALETTE[row], dashed=i > 0)
            ax.axhline(1, color="0.5", lw=0.6)
            ax.set_yscale("log")
            ax.set_xticks(range(len(ways)), [f"{s:g}" for s in strengths], fontsize=8)
            ax.tick_params(axis="y", which="both", labelsize=7)
            ax.spines[["top", "right"]].set_visible(False)
            if column == 0:
                ax.set_ylabel(label, fontsize=9)
        masses = [result.moved[name].mass.mean() for name in names]
        reached = "" if np.isnan(masses[-1]) else f"\nsink mass {masses[0]:.2f} → {masses[-1]:.2f}"
        axes[0][column].set_title(f"{how}{reached}", fontsize=9)
        axes[2][column].set_xlabel(HOWS[how], fontsize=6.5)
    for row in axes:
        few_ticks(row[0])
    title = f"The Hessian of {result.model} as an attention sink grows"
    figure.suptitle("\n".join(textwrap.wrap(title, int(9 * size[0]))), fontsize=11)
    return figure


def few_ticks(ax: Axes) -> None:
    """Labels of a logarithmic axis, as many as fit."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    low, high = ax.get_ylim()
    decades = float(np.log10(high / low))
    subs = (1.0, 2.0, 5.0) if decades < DENSE else (1.0, 3.0) if decades < 2 * DENSE else (1.0,)
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _follow(
    ax: Axes, result: Sinks, names: list[str], quantity: Quantity, *, color: str, dashed: bool
) -> None:
    """Means over texts as a line; where it is not dashed, texts as dots with errors, beside each other."""
    found = [effect(result, name, quantity) for name in names]
    x = np.arange(len(names))
    ax.plot(x, [one.mean for one in found], "--" if dashed else "-", lw=1.2, color=color)
    count = len(found[0].texts)
    for t in range(0 if dashed else count):
        values = np.array([one.texts[t] for one in found])
        spread = np.array([one.errors[t] for one in found])
        errors = [values - values * np.exp(-spread), values * np.exp(spread) - values]
        aside = ASIDE * (len(names) - 1) * (t - (count - 1) / 2)
        ax.errorbar(
            x + aside, values, yerr=np.nan_to_num(errors), fmt="o", ms=2.5, lw=0.8, color=color, alpha=0.6
        )


def _heads(result: Sinks) -> Figure:
    import matplotlib.pyplot as plt

    heads = result.heads
    panels = 2 + bool(heads.massive.size)
    figure, axes = plt.subplots(1, panels, figsize=(3.9 * panels, 3.1), layout="constrained", squeeze=False)
    _map(axes[0][0], heads.mass, "weight on the first token", (0.0, 1.0))
    high = float(np.nanmax(heads.values)) if np.isfinite(heads.values).any() else 1.0
    _map(axes[0][1], heads.values, "‖v‖ at the first token over others'", (0.0, max(high, 1.0)))
    if panels > 2:
        ax, x = axes[0][2], np.arange(len(heads.points))
        ax.plot(x, heads.massive, "-o", ms=4, lw=1.2, color=PALETTE[1], label="first token")
        ax.plot(x, heads.massive_others, "-o", ms=4, lw=1.2, color=PALETTE[0], label="other tokens")
        every = max(1, len(x) // 12)
        ax.set_xticks(x[::every], heads.points[::every], fontsize=8)
        ax.set_ylim(0)
        ax.set_title("largest over median |x| in the stream", fontsize=10, loc="left")
        ax.legend(fontsize=8, frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def _map(ax: Axes, values: np.ndarray, title: str, limits: tuple[float, float]) -> None:
    image = ax.imshow(values, cmap=style.MAP, vmin=limits[0], vmax=limits[1], aspect="auto")
    if max(values.shape) <= NUMBERED:
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                color = style.ink_at(image, value)
                ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    ax.set_xticks(range(0, values.shape[1], max(1, values.shape[1] // NUMBERED)))
    ax.set_yticks(range(0, values.shape[0], max(1, values.shape[0] // NUMBERED)))
    ax.set_xlabel("head", fontsize=8)
    ax.set_ylabel("layer", fontsize=8)
    ax.set_title(title, fontsize=10, loc="left")
    ax.figure.colorbar(image, ax=ax, shrink=0.85)


def _blocks(result: Sinks) -> Figure:
    """λ_max of every group of blocks at the last strength of each way, as a factor."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    before, ways = result.blocks[UNCHANGED], result.last()
    times = np.array([result.blocks[way.name].values for way in ways]).T / before.values[:, None]
    far = max(float(np.nanmax(np.abs(np.log(np.where(times > 0, times, np.nan))))), 0.1)
    figure, ax = plt.subplots(
        figsize=(2.6 + 1.1 * len(ways), 1.3 + 0.42 * len(before.names)), layout="constrained"
    )
    norm = LogNorm(vmin=np.exp(-far), vmax=np.exp(far))
    image = ax.imshow(np.ma.masked_less_equal(times, 0), norm=norm, cmap=style.SIGNED, aspect="auto")
    for (i, j), value in np.ndenumerate(times):
        faint = value > 0 and abs(np.log(value)) < 0.6 * far
        ax.text(
            j, i, f"× {value:.2g}", ha="center", va="center", fontsize=8, color="black" if faint else "white"
        )
    ax.set_xticks(range(len(ways)), [f"{way.how} {way.strength:g}" for way in ways], fontsize=8)
    rows = [f"{name} ({value:.3g})" for name, value in zip(before.names, before.values, strict=True)]
    ax.set_yticks(range(len(rows)), rows, fontsize=8)
    figure.colorbar(image, ax=ax, label="λ_max, times")
    return figure
