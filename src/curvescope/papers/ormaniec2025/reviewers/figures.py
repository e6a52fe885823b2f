"""The figures of the answers, one a question; from stored arrays, measuring nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.papers.ormaniec2025.reviewers.measure import Sweep
from curvescope.papers.ormaniec2025.reviewers.panels import (
    band,
    dots,
    draw_merged,
    draw_softmax,
    logarithmic,
    plain,
    row_of,
)
from curvescope.papers.ormaniec2025.reviewers.questions import (
    architectures,
    depth,
    dropped,
    gradient,
    regimes,
)
from curvescope.papers.ormaniec2025.reviewers.slopes import exponents, local_slopes, mean_of
from curvescope.viz.blocks import PALETTE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.papers.ormaniec2025.reviewers.study import Reviewers

ROLES: dict[str, str] = dict(zip(("W_Q", "W_K", "W_V", "W_O"), PALETTE, strict=False))
DASHES = {"targets ∝ σ": ":", "fitted at σ = 0.1": "--"}


def draw(result: Reviewers) -> dict[str, Figure]:
    """A figure for each question."""
    return {
        "reviewers_depth": _depth(result),
        "reviewers_dropped": _dropped(result),
        "reviewers_architectures": _architectures(result),
        "reviewers_regimes": _regimes(result),
        "reviewers_merged": draw_merged(result),
        "reviewers_gradient": _gradient(result),
        "reviewers_softmax": draw_softmax(result),
    }


def _depth(result: Reviewers) -> Figure:
    figure, axes = row_of(2, size=(10, 4.6), sharey=True)
    for ax, part in zip(axes, ("H_o", "H"), strict=True):
        for (of, role), power in depth.ORDERS.items():
            if of == part:
                ax.axvline(power, color=ROLES[role], lw=0.8, ls=":", zorder=0)
        for row, case in enumerate(depth.CASES):
            found = result.of(Sweep)[f"depth.{case}"]
            for block in found.blocks:
                role = block.partition(".")[2]
                mean = mean_of(exponents(found.sigma, found.curve(part, block)))
                place = -row + 0.22 * (list(ROLES).index(role) - 1)
                dots(
                    ax, [mean], [place], color=ROLES[role], label=role if not row and block[1] == "0" else ""
                )
        ax.set_title(f"exponents of ‖{part}‖", fontsize=10, loc="left")
        ax.set_xlabel("power of σ")
        plain(ax)
    axes[0].set_yticks([-row for row in range(len(depth.CASES))], list(depth.CASES), fontsize=9)
    axes[1].legend(fontsize=8, frameon=False, loc="upper right")
    return figure


def _dropped(result: Reviewers) -> Figure:
    figure, axes = row_of(2, size=(10.5, 4))
    for i, case in enumerate(dropped.CASES):
        found = result.of(Sweep)[f"dropped.{case}"]
        divided = found.curve("H_f", dropped.BLOCK) / found.sigma**5
        color, dashes = (*PALETTE, "0.35")[i], DASHES.get(case, "-")
        for ax, curves in zip(axes, (found.slope, divided), strict=True):
            above = 3 if case in DASHES else 2  # seen on a line that it lies on
            band(ax, found.sigma, curves, color=color, label=case, ls=dashes, zorder=above)
    titles = "‖∂ℓ/∂F‖ of a term", "‖H_f(W_Q)‖/σ⁵: level where the order holds"
    for ax, title in zip(axes, titles, strict=True):
        logarithmic(ax)
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_xlabel("σ")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    return figure


def _architectures(result: Reviewers) -> Figure:
    names = list(architectures.ARCHITECTURES)
    sweeps = {name: result.of(Sweep)[f"architecture.{name}"] for name in names}
    figure, axes = row_of(len(names), size=(13, 3.4), sharey=True,
        width_ratios=[len(one.blocks) for one in sweeps.values()],
    )  # fmt: skip
    for ax, (name, one) in zip(axes, sweeps.items(), strict=True):
        for i, part in enumerate(("H_o", "H")):
            means = [mean_of(values) for values in architectures.orders(one, part).T]
            places = np.arange(len(one.blocks)) + 0.2 * (i - 0.5)
            dots(ax, means, places, color=PALETTE[i], label=part, upright=True)
        labels = [block.removeprefix("L0.") for block in one.blocks]
        ax.set_xticks(range(len(labels)), labels, fontsize=8)
        ax.set_xlim(-0.6, len(labels) - 0.4)
        ax.set_title(f"{name}\n{sum(one.sizes)} parameters", fontsize=9)
        plain(ax)
    axes[0].set_ylabel("power of σ")
    axes[0].set_ylim(0, 6.6)
    axes[0].legend(fontsize=8, frameon=False, loc="upper right")
    return figure


def _regimes(result: Reviewers) -> Figure:
    figure, axes = row_of(len(regimes.CASES), size=(13, 3.6), sharey=True)
    for ax, case in zip(axes, regimes.CASES, strict=True):
        found = result.of(Sweep)[f"regime.{case}"]
        middle = np.sqrt(found.sigma[1:] * found.sigma[:-1])
        for i, block in enumerate(found.blocks):
            slopes = np.array([local_slopes(found.sigma, curve) for curve in found.curve("H", block)])
            known = np.isfinite(slopes).all(0)
            label, dashes = block.removeprefix("L0."), "--" if i % 2 else "-"
            band(ax, middle[known], slopes[:, known], linear=True, color=PALETTE[i], label=label, ls=dashes)
        ax.set_xscale("log")
        ax.set_title(case, fontsize=10, loc="left")
        ax.set_xlabel("σ")
        ax.axhline(0, color="0.6", lw=0.6)
        ax.axvline(1, color="0.4", lw=0.8, ls=":")
        ax.legend(fontsize=8, frameon=False, loc="lower left", ncols=2)
        plain(ax)
    axes[0].set_ylabel("local slope of ‖H‖")
    axes[0].set_ylim(-8, 8)
    return figure


def _gradient(result: Reviewers) -> Figure:
    found = result.of(Sweep)["regime.softmax"]
    figure, axes = row_of(3, size=(12, 3.8), sharex=True)
    for ax, part in zip(axes, ("gradient", "H_o", "H"), strict=True):
        for role in gradient.ROLES:
            slope = mean_of(gradient.order(found, part, role)).value
            curves = found.curve(part, f"L0.{role}")
            label, ls = f"{role}: σ$^{{{slope:.1f}}}$", "--" if role in ("W_K", "W_O") else "-"
            band(ax, found.sigma, curves, color=ROLES[role], label=label, ls=ls)
        logarithmic(ax)
        ax.set_ylim(found.curve(part, "L0.W_Q")[:, 0].min() / 10, 1e6)
        ax.axvline(1, color="0.4", lw=0.8, ls=":")
        ax.set_title("gradient" if part == "gradient" else f"${part}$", fontsize=10, loc="left")
        ax.set_xlabel("σ")
        ax.legend(fontsize=8, frameon=False, loc="upper left")
    axes[0].set_ylabel("norm of the block")
    return figure
