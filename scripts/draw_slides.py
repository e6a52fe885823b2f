"""Draw the figures of docs/slides.md from the numbers that the code on that page computes.

python scripts/draw_slides.py
"""

import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvescope.viz.blocks import PALETTE

DOCS = Path(__file__).parent.parent / "docs"


def main() -> None:
    space: dict[str, Any] = {}
    page = (DOCS / "slides.md").read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", page, flags=re.S):
        exec(compile(code, "docs/slides.md", "exec"), space)
    for name, draw in (("step", step), ("sharpness", sharpness), ("newton", newton)):
        path = DOCS / "images" / f"slides-{name}.png"
        draw(space).savefig(path, dpi=110)
        print(path)


def panels() -> tuple[Figure, list[Axes]]:
    """Return two panels side by side."""
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(lw=0.3, color="0.9")
    return figure, list(axes)


def step(space: dict[str, Any]) -> Figure:
    """Draw the loss after one step over the step size, in units of the threshold."""
    figure, axes = panels()
    for ax, name, curvature, title in zip(
        axes,
        ("one_direction", "whole_gradient"),
        ("λ_max", "κ"),
        ("along the sharpest direction", "along the whole gradient"),
        strict=True,
    ):
        loss = np.array(space[name])
        ax.plot(space["shares"], loss, "o-", ms=3.5, lw=1.3, color=PALETTE[0])
        ax.axhline(loss[0], color="0.4", lw=0.8)
        ax.axvline(1, color=PALETTE[1], lw=1.0, ls="--")
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_xlabel(f"η / (2/{curvature})", fontsize=9)
    axes[1].axvline(space["along"] / space["sharpest"], color=PALETTE[3], lw=1.0, ls=":")
    axes[1].annotate("η = 2/λ_max", (space["along"] / space["sharpest"], 0.92), xytext=(4, 0),
                     xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=8,
                     color=PALETTE[3])  # fmt: skip
    axes[0].set_ylabel("loss after one step", fontsize=9)
    return figure


def sharpness(space: dict[str, Any]) -> Figure:
    """Draw λ_max over a factor that does not change the outputs."""
    figure, axes = panels()
    titles = ("ReLU network: c W_1, W_2/c", "tiny-gpt, layer 0: c W_V, W_O/c")
    for ax, values, losses, title in zip(axes, space["sharpness"], space["losses"], titles, strict=True):
        ax.loglog(space["factors"], values, "o-", ms=4, lw=1.3, color=PALETTE[1], base=2)
        ax.set_yscale("log", base=10)
        ax.set_title(f"{title}; loss {losses[0]:.3f} at every c", fontsize=9, loc="left")
        ax.set_xlabel("c", fontsize=9)
    axes[0].set_ylabel("λ_max", fontsize=9)
    return figure


def newton(space: dict[str, Any]) -> Figure:
    """Draw the excess loss on a convex problem, and the paths of both methods near a saddle."""
    figure, (left, right) = panels()
    colors = {"Newton": PALETTE[1], "descent": PALETTE[0]}
    least = min(losses.min() for losses, _ in space["convex"].values())
    for name, (losses, _) in space["convex"].items():
        excess = losses - least
        shown = excess > 1e-15
        left.semilogy(
            np.flatnonzero(shown), excess[shown], "o-", ms=3, lw=1.2, color=colors[name], label=name
        )
    left.set_xscale("symlog", linthresh=5)
    left.set_xticks(ticks := [0, 1, 2, 3, 4, 5, 20, 50, 200], [str(tick) for tick in ticks], fontsize=8)
    left.minorticks_off()
    left.set_xlabel("step", fontsize=9)
    left.set_ylabel("loss above its minimum", fontsize=9)
    left.set_title("logistic regression", fontsize=10, loc="left")
    left.legend(fontsize=8, frameon=False, loc="lower right")
    w, v = np.meshgrid(np.linspace(-0.3, 1.6, 120), np.linspace(-0.3, 1.6, 120))
    right.contour(w, v, (v * w - 1) ** 2, levels=np.geomspace(0.01, 4, 12), colors="0.75", linewidths=0.7)
    for name, (_, points) in space["saddle"].items():
        right.plot(*points.numpy().T, "o-", ms=3.5, lw=1.3, color=colors[name])
    right.plot(0, 0, "x", ms=9, mew=1.8, color="0.2")
    right.annotate("saddle", (0, 0), xytext=(6, -14), textcoords="offset points", fontsize=8)
    right.set_title("(v w − 1)², from the same start", fontsize=10, loc="left")
    right.set_xlabel("w", fontsize=9)
    right.set_ylabel("v", fontsize=9)
    return figure


if __name__ == "__main__":
    main()
