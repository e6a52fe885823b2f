"""The figures of the study `weight_norms`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.studies.weight_norms.random_models import ROLES
from curvescope.viz.blocks import PALETTE
from curvescope.viz.style import MANY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from curvescope.studies.weight_norms.study import WeightNorms

LABELS = {"pre": "with norms", "none": "without norms"}
MARKS = "osD^v<>P*X"
TICKS = (0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def draw(result: WeightNorms) -> dict[str, Figure]:
    """Blocks over training, and random models where there are any."""
    found = {"over_training": _training(result)}
    return found | ({"random_models": _random(result)} if result.random else {})


def _training(result: WeightNorms) -> Figure:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", width_ratios=[3, 2])
    roles = list(dict.fromkeys(name.rpartition(".")[2] for name in result.blocks))
    sizes, tops = (
        np.array([getattr(t, name) for t in result.trained.values()]) for name in ("spectral", "lambda_max")
    )
    for i, block in enumerate(result.blocks):
        role = roles.index(block.rpartition(".")[2])
        left.plot(sizes[:, i], tops[:, i], "-", lw=0.6, color=MANY[role % len(MANY)], alpha=0.6)
    for j, name in enumerate(result.trained):
        for k, role in enumerate(roles):
            of = [i for i, block in enumerate(result.blocks) if block.rpartition(".")[2] == role]
            mark = MARKS[j % len(MARKS)]
            left.plot(sizes[j, of], tops[j, of], mark, ms=4.5, color=MANY[k % len(MANY)])
        left.plot([], [], MARKS[j % len(MARKS)], color="0.4", label=name)
    for k, role in enumerate(roles):
        left.plot([], [], "-", color=MANY[k % len(MANY)], label=role)
    left.set(xlabel="spectral norm ‖W‖₂ of the block's weights", ylabel="λ_max of the block")
    _log_norms(left)
    left.set_yscale("log" if (tops > 0).all() else "symlog")
    left.legend(fontsize=7, frameon=False, ncols=2)
    names = {"within, all": "within.all", "pooled, all": "blocks.all"} | {r: f"blocks.{r}" for r in roles}
    _forest(right, result, names)
    right.set_title("rank correlation of λ_max with ‖W‖", fontsize=10, loc="left")
    _plain(left)
    return figure


def _forest(ax: Axes, result: WeightNorms, rows: dict[str, str]) -> None:
    y = np.arange(len(rows))[::-1]
    for i, (kind, label) in enumerate((("spectral", "spectral"), ("frobenius", "Frobenius"))):
        found = [result.correlations[f"{key}.{kind}"] for key in rows.values()]
        values = np.array([one.value for one in found])
        ends = np.array([[one.value - one.low, one.high - one.value] for one in found]).T
        ax.errorbar(
            values, y + 0.13 - 0.26 * i, xerr=np.maximum(np.nan_to_num(ends), 0.0), fmt="o", ms=4, lw=1,
            color=PALETTE[i], label=label,
        )  # fmt: skip
    ax.axvline(0, color="0.5", lw=0.8)
    ax.set_yticks(y, list(rows), fontsize=8)
    ax.set_xlim(-1.05, 1.05)
    ax.set_xticks([-1, -0.5, 0, 0.5, 1])
    ax.set_xlabel("Spearman's ρ")
    ax.legend(fontsize=8, frameon=False, loc="lower left")
    _plain(ax)


def _random(result: WeightNorms) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(11, 6), layout="constrained", sharey=True)
    for j, (ax, role) in enumerate(zip(axes.flat, ROLES, strict=True)):
        for i, (norm, models) in enumerate(result.random.items()):
            one = result.correlation(norm, role, "spectral")
            label = f"{LABELS[norm]}: ρ = {one.words}"
            ax.plot(models.spectral[:, j], models.lambda_max, "o", ms=3.5, color=PALETTE[i], label=label)
        _log_norms(ax)
        ax.set_yscale("log")
        ax.set_title(role, fontsize=10, loc="left")
        ax.legend(fontsize=7, frameon=False, loc="upper left")
        _plain(ax)
    low, high = axes[0][0].get_ylim()
    axes[0][0].set_ylim(low, high * (high / low) ** 0.25)  # room for the legends
    figure.supxlabel("spectral norm ‖W‖₂", fontsize=10)
    figure.supylabel("λ_max of the Hessian", fontsize=10)
    return figure


def _log_norms(ax: Axes) -> None:
    """A logarithmic axis of norms with a few plain numbers under it."""
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ticks = [tick for tick in TICKS if low <= tick <= high]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    ax.minorticks_off()


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(lw=0.3, color="0.9")
