"""The figures of the study `scaling`: from its arrays and laws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.scaling.quantities import QUANTITIES, VARIABLES
from curvescope.viz.blocks import PALETTE
from curvescope.viz.ticks import plain_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.scaling.study import Scaling

SHOWN = ("excess_loss", "lambda_max", "frobenius", "effective_rank", "gap")
GUIDE = -0.5  # the exponent of D that the article draws


def draw(result: Scaling) -> dict[str, Figure]:
    """Quantities over N and D with their laws, all exponents, and the data that a tolerance needs."""
    return {"scaling": _grid(result), "exponents": _exponents(result), "data_needed": _needed(result)}


def _panels(rows: int, columns: int, *, figsize: tuple[float, float], sharey: bool = False) -> Any:
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=figsize, sharey=sharey, layout="constrained")


def _grid(result: Scaling) -> Figure:
    figure, axes = _panels(2, len(SHOWN), figsize=(3.0 * len(SHOWN) + 1.2, 6.4))
    for i, variable in enumerate(VARIABLES):
        for j, quantity in enumerate(SHOWN):
            _panel(axes[i][j], result, quantity, variable)
        axes[i][-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle("Loss and curvature over model size and data size", fontsize=12)
    return figure


def _panel(ax: Axes, result: Scaling, quantity: str, variable: str) -> None:
    """Points of all seeds, one color for each value of the other variable, and the law through them."""
    other = "D" if variable == "N" else "N"
    x, z, q = result.variable(variable), result.variable(other), result.values(quantity)[:, 0]
    law = result.law(quantity, variable)
    ends = np.array([x.min(), x.max()])
    for i, value in enumerate(np.unique(z)):
        here = (z == value) & (q > 0)
        color = _color(i, len(np.unique(z)))
        ax.plot(x[here], q[here], "o", ms=3.5, color=color, label=f"{other} = {value:,.0f}", alpha=0.85)
        if np.isfinite(law.exponent):
            middle = np.exp(np.log(q[here]).mean() + law.exponent * (np.log(ends) - np.log(x[here]).mean()))
            ax.plot(ends, middle, "-" if law.supported else ":", lw=1, color=color)
    ax.set(xscale="log", yscale="log", xlabel=f"{variable}, {VARIABLES[variable]}")
    ax.set_xticks(np.unique(x), [_short(value) for value in np.unique(x)], fontsize=8)
    ax.set_xticks([], minor=True)
    plain_numbers(ax)
    ax.tick_params(axis="y", which="both", labelsize=7)
    title = f"{QUANTITIES[quantity].symbol} ∝ {variable}$^{{{law.exponent:+.2f}}}$"
    ax.set_title(f"{title}\n[{law.low:+.2f}, {law.high:+.2f}]", fontsize=9, loc="left")
    _plain(ax)


def _short(count: float) -> str:
    """`128`, `1.3k`, `0.8M`."""
    return f"{count:.0f}" if count < 1e3 else f"{count / 1e3:.1f}k" if count < 1e6 else f"{count / 1e6:.1f}M"


def _color(i: int, count: int) -> tuple[float, float, float]:
    """From dark blue to light green."""
    share = i / max(count - 1, 1)
    first, last = np.array([0.16, 0.12, 0.42]), np.array([0.55, 0.84, 0.27])
    red, green, blue = (first + share * (last - first)).tolist()
    return red, green, blue


def _exponents(result: Scaling) -> Figure:
    figure, axes = _panels(1, 2, figsize=(9.5, 4.2), sharey=True)
    names = list(QUANTITIES)
    for ax, variable in zip(axes, VARIABLES, strict=True):
        for i, name in enumerate(names):
            law = result.law(name, variable)
            face = PALETTE[0] if law.supported else "white"
            ax.plot([law.low, law.high], [-i, -i], "-", lw=1.6, color=PALETTE[0])
            ax.plot(law.exponent, -i, "o", ms=6, color=PALETTE[0], mfc=face)
        ax.axvline(0, color="0.4", lw=0.7)
        ax.set_title(f"exponent of {variable}, {VARIABLES[variable]}", fontsize=10, loc="left")
        _plain(ax)
    axes[1].axvline(GUIDE, color=PALETTE[1], lw=1, ls="--", label="1/√D")
    axes[1].legend(fontsize=8, frameon=False)
    axes[0].set_yticks(-np.arange(len(names)), [QUANTITIES[name].symbol for name in names], fontsize=9)
    return figure


def _needed(result: Scaling) -> Figure:
    figure, (left, right) = _panels(1, 2, figsize=(9.5, 3.8))
    n, d = result.variable("N"), result.variable("D")
    sizes, seeds = np.unique(n), max(cell.seed for cell in result.cells) + 1
    for i, size in enumerate(sizes):
        here = np.flatnonzero(n == size)
        needed = [result.cells[j].needed for j in here]
        seed = np.array([result.cells[j].seed for j in here])
        shifted = d[here] * 1.05 ** ((i * seeds + seed) - len(sizes) * seeds / 2)
        style = {"fmt": "o", "ms": 3, "lw": 0.8, "color": _color(i, len(sizes))}
        k = np.array([(one.k, one.k_low, one.k_high) for one in needed], dtype=float)
        left.errorbar(shifted, k[:, 0], yerr=_bars(k), label=f"N = {size:,.0f}", **style)
        r = np.array([(one.rms, one.rms_low, one.rms_high) for one in needed]) / needed[0].tolerance
        right.errorbar(shifted, r[:, 0], yerr=_bars(r), **style)
    left.set(xscale="log", yscale="log", xlabel="D, tokens trained on", ylabel="k, sequences")
    left.set_title(f"needed for τ = {result.cells[0].needed.tolerance:g} nats", fontsize=10, loc="left")
    left.legend(fontsize=8, frameon=False)
    plain_numbers(left)
    right.axhline(1, color="0.4", lw=0.8)
    right.set(xscale="log", xlabel="D, tokens trained on", ylabel="rms of L$_{k+1}$ − L$_k$ over τ")
    right.set_title("checked on fresh sequences", fontsize=10, loc="left")
    _plain(left)
    _plain(right)
    return figure


def _bars(triples: np.ndarray) -> np.ndarray:
    """Distances down and up from (value, low, high)."""
    return np.nan_to_num(np.maximum([triples[:, 0] - triples[:, 1], triples[:, 2] - triples[:, 0]], 0.0))


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(lw=0.3, color="0.9")
