"""Draw the figures of docs/concepts from the numbers that the code on those pages computes.

python scripts/draw_concepts.py [hessian ggn …]
"""

import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, SymLogNorm
from matplotlib.figure import Figure
from PIL import Image

from curvescope.viz import style
from curvescope.viz.style import PALETTE

DOCS = Path(__file__).parent.parent / "docs"
SIGNED = LinearSegmentedColormap.from_list("signed", style.DIVERGING)
POSITIVE = LinearSegmentedColormap.from_list("positive", style.SEQUENTIAL)


def main(names: list[str]) -> None:
    for name in names or list(DRAWN):
        space: dict[str, Any] = {}
        page = (DOCS / "concepts" / f"{name}.md").read_text(encoding="utf-8")
        for code in re.findall(r"```python\n(.*?)```", page, flags=re.S):
            exec(compile(code, f"docs/concepts/{name}.md", "exec"), space)
        path = DOCS / "images" / f"concepts-{name.replace('_', '-')}.png"
        with style.context():
            DRAWN[name](space).savefig(path, dpi=200)  # seven inches are the width of a page
        Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # a quarter of the bytes
        print(path)


def panels(widths: tuple[float, ...] = (1, 1), height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """Return panels side by side."""
    figure, axes = plt.subplots(
        1, len(widths), figsize=(7, height), layout="constrained", width_ratios=widths
    )
    return figure, list(axes)


def titled(ax: Axes, title: str, x: str, y: str = "") -> None:
    ax.set(title=title, xlabel=x, ylabel=y)


def eigenvalues(ax: Axes, values: Any, label: str, color: str, marker: str = ".") -> None:
    """Draw all eigenvalues in order, with signs, on an axis that is linear around zero."""
    values = np.asarray(values)
    ax.plot(np.arange(1, len(values) + 1), values, marker, ms=3.5, color=color, label=label)
    ax.axhline(0, color="0.6", lw=0.6)
    ax.set_yscale("symlog", linthresh=1e-2)
    ax.set_ylim(3 * values.min() if values.min() < -1e-2 else None, 3 * values.max())


def hessian(space: dict[str, Any]) -> Figure:
    figure, (left, right) = panels()
    steps = np.asarray(space["steps"])
    for color, (name, walk) in zip(PALETTE, space["walks"].items(), strict=False):
        bend, slope = space["curvature"][name], space["slope"][name]
        parabola = space["problem"].loss_value() + slope * steps + bend * steps**2 / 2
        left.plot(steps, walk, "-", color=color, lw=1.6, label=f"{name}: curvature {bend:.3g}")
        left.plot(steps, parabola, color=color, lw=1, ls="--")
    left.set_ylim(top=1.42)
    left.legend(loc="upper center")
    titled(left, "Three directions from the same point", "distance", "loss")
    eigenvalues(right, space["values"], "H", PALETTE[0])
    titled(right, f"All {len(space['values'])} eigenvalues", "in order", "λ")
    return figure


def ggn(space: dict[str, Any]) -> Figure:
    figure, (left, right) = panels()
    steps, start = np.asarray(space["steps"]), space["problem"].loss_value()
    lines = {"loss": ("true", "H", PALETTE[0]), "linearized model": ("linear", "H_o", PALETTE[1])}
    for label, (name, matrix, color) in lines.items():
        parabola = start + space["slope"] * steps + space["bends"][matrix] * steps**2 / 2
        left.plot(steps, space[name], "-", color=color, lw=1.6, label=label)
        left.plot(steps, parabola, color=color, lw=1, ls="--", label=f"parabola of {matrix}")
    left.legend()
    titled(left, "The most negative direction of H", "distance", "loss")
    eigenvalues(right, space["values"], "H", PALETTE[0])
    eigenvalues(right, space["values_ggn"].clamp_min(0), "H_o", PALETTE[1], marker="+")
    right.legend()
    titled(right, "All eigenvalues", "in order", "λ")
    return figure


def functional(space: dict[str, Any]) -> Figure:
    figure, (left, *images) = panels((1.6, 1, 1, 1), height=2.3)
    step, _, _, outer, rest = np.array(space["course"]).T
    for values, label, marker in ((outer, "‖H_o‖", "s-"), (rest, "‖H_f‖", "o-")):
        color = PALETTE[1] if label == "‖H_o‖" else PALETTE[2]
        left.semilogy(step, values, marker, ms=4, lw=1.4, color=color, label=label)
    left.legend()
    titled(left, "Over training", "step", "Frobenius norm")
    largest = float(space["parts"]["H"].abs().max())
    for ax, (name, matrix) in zip(images, space["parts"].items(), strict=True):
        scale = SymLogNorm(largest / 30, vmin=-largest, vmax=largest)
        ax.imshow(matrix, cmap=SIGNED, norm=scale)
        half = len(matrix) / 2
        ax.grid(False)
        ax.axhline(half - 0.5, color="0.3", lw=0.7)
        ax.axvline(half - 0.5, color="0.3", lw=0.7)
        ax.set_xticks([half / 2, 1.5 * half], ["W_Q", "W_K"])
        ax.set_yticks([half / 2, 1.5 * half], ["W_Q", "W_K"] if ax is images[0] else ["", ""])
        titled(ax, name, "")
    return figure


def blocks(space: dict[str, Any]) -> Figure:
    figure, (left, right) = panels(height=3.5)
    for ax in (left, right):
        ax.grid(False)
    cuts, names = space["cuts"], space["names"]
    entries = np.abs(np.asarray(space["whole"])) + 1e-12
    top = entries.max()
    image = left.imshow(entries, norm=LogNorm(top * 1e-6, top), cmap=POSITIVE)
    figure.colorbar(image, ax=left, shrink=0.7).ax.tick_params(labelsize=7)
    for cut in cuts.values():
        left.axhline(cut.start - 0.5, color="w", lw=0.3)
        left.axvline(cut.start - 0.5, color="w", lw=0.3)
    middles = [(cuts[name].start + cuts[name].stop) / 2 for name in names]
    short = [name.removeprefix("L0.") for name in names]
    left.set_yticks(middles, short)
    left.set_xticks(middles, short, rotation=90)
    titled(left, "|H|, every entry", "")
    norms = space["sizes"].frobenius
    image = right.imshow(norms, norm=LogNorm(norms.max() * 1e-3, norms.max()), cmap=POSITIVE)
    figure.colorbar(image, ax=right, shrink=0.7).ax.tick_params(labelsize=7)
    right.set_xticks(range(len(names)), short, rotation=90)
    right.set_yticks(range(len(names)), short)
    titled(right, "Norms of all pairs, from 4 probes each", "")
    return figure


def error_bars(space: dict[str, Any]) -> Figure:
    figure, (left, right) = panels((1.3, 1))
    for i, (estimate, held) in enumerate(zip(space["found"], space["held"], strict=True)):
        color = PALETTE[0] if held else PALETTE[1]
        left.plot([i, i], [estimate.low, estimate.high], "-", color=color, lw=1.2 if held else 2.2)
        left.plot(i, estimate.value, "o" if held else "X", ms=2.6 if held else 5, color=color)
    left.axhline(space["truth"], color="0.2", lw=1)
    left.set_ylim(bottom=0)
    titled(left, "Sixty 95 % intervals; the line is the truth", "seed", "trace of the GGN")
    for color, marker, (name, errors) in zip(PALETTE, "os^", space["errors"].items(), strict=False):
        right.loglog(space["counts"], errors, marker + "-", ms=4, lw=1.4, color=color, label=name)
    first = space["errors"]["hutchinson"][0]
    right.loglog(
        space["counts"],
        [first * (space["counts"][0] / P) ** 0.5 for P in space["counts"]],
        ":",
        color="0.5",
        label="1/√P",
    )
    right.set_xticks(space["counts"], [str(P) for P in space["counts"]])
    right.minorticks_off()
    right.legend()
    titled(right, "Error made, relative", "products")
    return figure


DRAWN = {"hessian": hessian, "ggn": ggn, "functional": functional, "blocks": blocks, "error_bars": error_bars}


if __name__ == "__main__":
    main(sys.argv[1:])
