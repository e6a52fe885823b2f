"""The figures of the study `gap`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms import SpectralDensity
from curvescope.studies.gap.pair import Number
from curvescope.viz import style
from curvescope.viz.style import LOOKS, PALETTE, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.gap.study import Gap

NAMES = {"hessian": "Hessian", "ggn": "GGN"}
ALL, BOUND = Look("black", "-", "o"), Look(style.GRAY, "--", "s")


def draw(result: Gap) -> dict[str, Figure]:
    """Over training, by block, densities, other targets."""
    found = {"over_training": _over_training(result), "blocks": _blocks(result)}
    if result.pair(result.checkpoints[-1]).densities:
        found["densities"] = _densities(result)
    if result.targets:
        found["other_targets"] = _targets(result)
    return found


def _panels(rows: int, columns: int, **options: Any) -> Any:
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, layout="constrained", squeeze=False, **options)


def _over_training(result: Gap) -> Figure:
    figure, axes = _panels(1, 3, figsize=(12.5, 3.7))
    pairs = [result.pair(name) for name in result.checkpoints]
    x = np.arange(len(pairs))
    ticks = [f"{name}\nloss {pair.loss:.2f}" for name, pair in zip(result.checkpoints, pairs, strict=True)]
    _line(axes[0][0], x, [pair.share() for pair in pairs], ALL, "all", width=2.0)
    for i, block in enumerate(result.blocks[1:7]):
        shares = [result.pair(name, block).share() for name in result.checkpoints]
        _line(axes[0][0], x, shares, style.look(i), block, width=0.9)
    axes[0][0].set_title("functional share ‖H_f‖/‖H‖", fontsize=10, loc="left")
    axes[0][0].set_ylim(bottom=0)
    for part, name in NAMES.items():
        _line(axes[0][1], x, [pair.top(part) for pair in pairs], LOOKS[part], name)
    axes[0][1].set_title("λ_max of the whole model", fontsize=10, loc="left")
    axes[0][1].set_yscale("log")
    _line(axes[0][2], x, [pair.wasserstein() for pair in pairs], LOOKS["hessian"], "W₁ / (‖H‖/√n)")
    _line(axes[0][2], x, [pair.share() for pair in pairs], BOUND, "‖H_f‖/‖H‖, which bounds W₁")
    axes[0][2].set_title("distance of the spectra", fontsize=10, loc="left")
    axes[0][2].set_ylim(bottom=0)
    for ax in axes[0]:
        ax.set_xticks(x, ticks, fontsize=8)
        ax.legend(fontsize=7, frameon=False)
        _plain(ax)
    return figure


def _line(ax: Axes, x: np.ndarray, found: list[Number], look: Look, label: str, width: float = 1.4) -> None:
    """A line with error bars; of what was not measured there is neither line nor name."""
    values = np.array([number.value for number in found])
    if not np.isfinite(values).any():
        return
    drawn = {"color": look.color, "ls": look.dash, "marker": look.mark, "ms": 3.5, "lw": width}
    ax.errorbar(x, values, yerr=np.nan_to_num([n.error for n in found]), label=label, elinewidth=1, **drawn)


def _blocks(result: Gap) -> Figure:
    height = 1.4 + 0.32 * len(result.blocks)
    figure, axes = _panels(1, 2, figsize=(4.2 + 1.6 * len(result.checkpoints), height))
    cells = [[result.pair(name, block) for name in result.checkpoints] for block in result.blocks]
    gaps = np.array([[100 * pair.gap().value for pair in row] for row in cells])
    shares = np.array([[pair.share().value for pair in row] for row in cells])
    top = float(np.nanmax(np.abs(gaps), initial=1e-12))
    limits = ({"vmin": -top, "vmax": top, "cmap": style.SIGNED}, {"vmin": 0, "cmap": style.MAP})
    titles = {"λ_max that the GGN misses, %": "+.1f", "functional share ‖H_f‖/‖H‖": ".2f"}
    panels = zip(axes[0], (gaps, shares), limits, titles.items(), strict=True)
    for ax, values, options, (title, digits) in panels:
        image = ax.imshow(np.ma.masked_invalid(values), aspect="auto", **options)
        for (i, j), value in np.ndenumerate(values):
            color = style.ink_at(image, value)
            text = f"{value:{digits}}" if np.isfinite(value) else "–"
            ax.text(j, i, text, ha="center", va="center", fontsize=8, color=color)
        ax.set_xticks(range(len(result.checkpoints)), result.checkpoints, fontsize=8)
        ax.set_yticks(range(len(result.blocks)), result.blocks, fontsize=8)
        ax.set_title(title, fontsize=10, loc="left")
        ax.tick_params(length=0)
    return figure


def _densities(result: Gap) -> Figure:
    """Shares above |λ| on both sides of zero, on logarithmic axes: one row of panels."""
    count = len(result.checkpoints)
    figure, axes = _panels(1, count, figsize=(3.2 * count + 0.8, 3.4), sharey=True)
    for ax, name in zip(axes[0], result.checkpoints, strict=True):
        pair = result.pair(name)
        for part, title in NAMES.items():
            for sign, dash in ((1, "-"), (-1, ":")):
                x, share = _tail(pair.densities[part], sign)
                if len(x):
                    label = f"{title}, {'λ > 0' if sign > 0 else 'λ < 0'}"
                    ax.step(x, share, where="pre", color=LOOKS[part].color, ls=dash, lw=1.3, label=label)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(left=1e-4 * max(float(d.extremes[1]) for d in pair.densities.values()))
        ax.set_xlabel("|λ|")
        value, error = pair.wasserstein()
        ax.set_title(f"{name}: W₁ = {value:.2f} ± {error:.2f} rms", fontsize=9, loc="left")
        _plain(ax)
    axes[0][0].set_ylabel("share of eigenvalues beyond")
    axes[0][0].legend(fontsize=7, frameon=False)
    return figure


def _tail(d: SpectralDensity, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """|λ| ascending, and the share of eigenvalues of this sign that are at least as far from zero."""
    nodes, weights = sign * d.nodes.ravel(), d.weights.ravel() / len(d.nodes)
    order = np.argsort(nodes)
    order = order[nodes[order] > 0]
    return nodes[order], np.cumsum(weights[order][::-1])[::-1]


def _targets(result: Gap) -> Figure:
    figure, axes = _panels(1, 2, figsize=(9, 3.6))
    pairs = {"own": result.pair(result.checkpoints[-1]), **result.targets}
    left, right = axes[0]
    for i, (name, pair) in enumerate(pairs.items()):
        value, error = pair.share()
        look = style.look(i)
        left.errorbar(
            pair.loss, value, yerr=np.nan_to_num(error), fmt=look.mark, color=look.color, label=name
        )
    left.set(xlabel="loss", ylabel="‖H_f‖/‖H‖")
    left.set_ylim(bottom=0)
    left.set_title("targets exchanged, parameters fixed", fontsize=10, loc="left")
    left.legend(fontsize=8, frameon=False)
    if result.draws is not None:
        counts, norms = result.draws.shrinking()
        right.plot(counts, norms, "o", color=PALETTE[0], label="‖mean of H_f‖")
        right.plot(counts, 1 / np.sqrt(counts), color="0.5", lw=1, label="1/√draws")
        right.set_xscale("log", base=2)
        right.set_yscale("log", base=2)
        right.set_xticks(counts, [f"{count:g}" for count in counts])
        right.set_yticks(2.0 ** -np.arange(3), ["1", "0.5", "0.25"])
        right.set_ylim(0.9 * min(norms.min(), counts[-1] ** -0.5), 1.15)
        right.set_xlabel("draws of targets from the model")
        right.set_title("the functional Hessian averages out", fontsize=10, loc="left")
        right.legend(fontsize=8, frameon=False)
    for ax in axes[0]:
        _plain(ax)
    return figure


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(lw=0.3, color="0.9")
