"""The figures of the sweeps: ours as lines, the published means as dots, guides of the claimed slopes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from curvescope.papers.ormaniec2025.growth.published import published_curves
from curvescope.papers.ormaniec2025.growth.settings import PARTS, Experiment, laws
from curvescope.papers.ormaniec2025.growth.words import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.papers.ormaniec2025.growth.study import Growth, Sweep

COLORS = {"W_V": "#7570b3", "W_Q": "#1b9e77", "W": "#2060c0"}
TITLES = {"H_o": "$H_o$ (GGN)", "H_f": "$H_f$ (functional Hessian)", "H": "$H$"}
LINES = 24  # of a family of guides, at most
TICKS = {
    "log": (0.01, 0.1, 1, 10),
    "log_short": (0.1, 0.2, 0.5, 1),
    "linear": (0, 1, 4, 7, 10),
    "linear_short": (0, 0.5, 1),
}


def draw(result: Growth) -> dict[str, Figure]:
    """A figure per sweep."""
    return {f"growth_{name}": draw_sweep(sweep) for name, sweep in result.sweeps.items()}


def draw_sweep(sweep: Sweep) -> Figure:
    """Rows W_V and W_Q, columns H_o, H_f, H; of an MLP one panel, since H_f is zero."""
    import matplotlib.pyplot as plt

    experiment = sweep.setting
    if experiment.family == "mlp":
        figure, ax = plt.subplots(figsize=(7.6, 4.4), layout="constrained")
        panel(ax, sweep, "W", "H")
        ax.set_title(title(experiment), fontsize=10)
        ax.set_ylabel("‖block‖ F")
        ax.set_xlabel("σ of the embeddings")
        _key(figure, COLORS["W"])
        return figure
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.6), layout="constrained", sharex=True)
    for ax_row, block in zip(axes, experiment.blocks, strict=True):
        for ax, part in zip(ax_row, PARTS, strict=True):
            panel(ax, sweep, block, part)
        ax_row[0].set_ylabel(f"{block[0]}$_{block[2]}$:  ‖block‖ F", color=COLORS[block])
    for ax, part in zip(axes[0], PARTS, strict=True):
        ax.set_title(TITLES[part], fontsize=11)
    for ax in (*axes[0], *axes[1]):
        ax.set_xlabel("σ of the embeddings" if ax in axes[1] else "")
    figure.suptitle(title(experiment), fontsize=11)
    _key(figure, "0.3")
    return figure


def panel(ax: Axes, sweep: Sweep, block: str, part: str) -> None:
    """One block and part: all layers."""
    experiment, depth = sweep.setting, sweep.setting.depth
    shown = [layer for layer in range(depth) if not experiment.is_zero(block, part, layer)]
    _scales(ax, experiment)
    if not shown:
        ax.set_yticks([])
        _note(ax, "exactly 0", at=(0.5, 0.5))
        return
    for layer in shown:
        fade = (layer + 2) / (depth + 1)
        _ours(ax, sweep, (block, part, layer), fade)
        _published(ax, sweep, (block, part, layer), fade)
    _limits(ax, sweep, block, part, shown)
    _guides(ax, experiment, block, part, shown[-1])
    _slopes(ax, sweep, block, part)
    if len(shown) < depth:
        ax.plot([], [], color="white", label=f"{depth - 1} (exactly 0)")
    if depth > 1:
        ax.legend(
            title="layer", frameon=False, fontsize=8, title_fontsize=8, loc="upper left", handlelength=1.2
        )


def _ours(ax: Axes, sweep: Sweep, curve: tuple[str, str, int], fade: float) -> None:
    values = sweep.curve(*curve)
    mean, color = values.mean(0), COLORS[curve[0]]
    ax.plot(sweep.sigma, mean, color=color, alpha=fade, lw=1.8, label=str(curve[2]))
    if len(values) > 1:
        error = values.std(0, ddof=1) / math.sqrt(len(values))
        low = np.maximum(mean - error, mean * 1e-2)  # a band to zero has no end on a logarithmic axis
        ax.fill_between(sweep.sigma, low, mean + error, color=color, alpha=0.25 * fade, lw=0)


def _published(ax: Axes, sweep: Sweep, curve: tuple[str, str, int], fade: float) -> None:
    found = published_curves(sweep.experiment).get(curve)
    if found is None:
        return
    good = np.isfinite(found.mean) & (found.mean > 0)
    x, mean, error = sweep.setting.sigmas[good], found.mean[good], np.nan_to_num(found.stderr[good])
    bars = np.stack([np.minimum(error, 0.99 * mean), error])
    ax.errorbar(
        x, mean, bars, fmt="o", ms=3.2, mfc="white", mec=COLORS[curve[0]], ecolor=COLORS[curve[0]],
        alpha=min(1.0, fade + 0.1), elinewidth=0.8, mew=0.8, zorder=3,
    )  # fmt: skip


def _scales(ax: Axes, experiment: Experiment) -> None:
    logarithmic = experiment.grid.startswith("log")
    if logarithmic:
        ax.set_xscale("log")
        ax.set_yscale("log")
        low, high = experiment.sigmas[0], experiment.sigmas[-1]
        ax.set_xlim(low * (low / high) ** 0.03, high * (high / low) ** 0.03)
    else:
        ax.set_xlim(0, experiment.sigmas[-1] * 1.03)
    ax.set_xticks(TICKS[experiment.grid], [f"{tick:g}" for tick in TICKS[experiment.grid]])
    ax.minorticks_off()
    ax.axvline(1, color="0.4", lw=0.8, ls=":")
    ax.spines[["top", "right"]].set_visible(False)


def _limits(ax: Axes, sweep: Sweep, block: str, part: str, shown: list[int]) -> None:
    means = [sweep.curve(block, part, layer).mean(0) for layer in shown]
    published = published_curves(sweep.experiment)
    means += [published[key].mean for layer in shown if (key := (block, part, layer)) in published]
    values = np.concatenate(means)
    values = values[np.isfinite(values) & (values > 0)]
    if sweep.setting.grid.startswith("log"):
        spare = (values.max() / values.min()) ** 0.06
        ax.set_ylim(values.min() / 3 / spare, values.max() * 3 * spare)
    else:
        ax.set_ylim(0, values.max() * 1.1)


def _guides(ax: Axes, experiment: Experiment, block: str, part: str, layer: int) -> None:
    """A family c^i σ^e of dashed lines, i = …, −1, 0, 1, …, for the exponent that the paper draws."""
    slope = next((law.claimed for law in laws(experiment, block, part, layer)), None)
    if slope is None:
        return
    low, high = ax.get_ylim()
    if experiment.grid.startswith("log"):
        x = experiment.sigmas[[0, -1]]
        ends = np.log10(np.clip([low, high], 1e-290, None))[:, None] - slope * np.log10(x)
        step = max(1.0, round(float(np.ptp(ends)) / LINES))
        factors = 10.0 ** np.arange(math.floor(ends.min()), math.ceil(ends.max()) + 1, step)
    else:
        x, factors = np.linspace(0, experiment.sigmas[-1], 60), 2.0 ** np.arange(-30, 12)
        factors = factors[(factors * x[-1] ** slope > 0.02 * high) & (factors * x[-1] ** slope < 500 * high)]
    for factor in factors:
        ax.plot(x, factor * x**slope, color="0.5", alpha=0.3, lw=0.8, ls="--", zorder=0)
    ax.set_ylim(low, high)


def _slopes(ax: Axes, sweep: Sweep, block: str, part: str) -> None:
    """What is claimed and what was measured in each regime, over the layers."""
    rows = [row for row in sweep.table_of_slopes() if (row.block, row.part) == (block, part)]
    lines = [f"claimed: σ$^{{{row.claimed:g}}}$" for row in rows[:1] if not math.isnan(row.claimed)]
    short = {row.regime for row in rows} >= {"small σ", "large σ"}  # what lies between is in the table
    rows = [row for row in rows if not (short and row.regime.startswith("σ"))]
    for low, high in dict.fromkeys((row.sigma_lo, row.sigma_hi) for row in rows):
        own = [row.measured for row in rows if (row.sigma_lo, row.sigma_hi) == (low, high)]
        ends = sorted({f"{min(own):.2f}", f"{max(own):.2f}"}, key=float)
        lines.append(f"slope {' to '.join(ends)} on [{low:g}, {high:g}]")
    corner = (0.04, 0.04) if sweep.setting.norm == "pre" else (0.98, 0.04)
    if not sweep.setting.grid.startswith("log"):
        corner = (0.04, 0.98)
    if lines:
        _note(ax, "\n".join(lines), at=corner)


def _key(figure: Figure, color: str) -> None:
    """What lines and dots are, once for the figure."""
    from matplotlib.lines import Line2D

    ours = Line2D([], [], color=color, lw=1.8, label="ours: mean ± standard error")
    dots = Line2D(
        [], [], color=color, marker="o", mfc="white", ms=4, ls="", label="published: mean ± standard error"
    )
    gray = Line2D([], [], color="0.5", alpha=0.5, lw=0.8, ls="--", label="claimed slope")
    figure.legend(handles=[ours, dots, gray], loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _note(ax: Axes, text: str, *, at: tuple[float, float]) -> None:
    ax.text(
        *at, text, transform=ax.transAxes, fontsize=8.5, color="0.2", va="top" if at[1] > 0.7 else "bottom",
        ha="left" if at[0] < 0.3 else "right" if at[0] > 0.7 else "center",
        bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1.5}, zorder=4,
    )  # fmt: skip
