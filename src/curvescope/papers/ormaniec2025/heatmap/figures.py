"""The figures of the heat map: from its arrays, nothing computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from curvescope.papers.ormaniec2025.heatmap.study import CELL
from curvescope.viz.blocks import cell_text
from curvescope.viz.interactive import Scene, scene
from curvescope.viz.matrix import LABEL, colors, entries_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.papers.ormaniec2025.heatmap.study import HeatMap


def draw(result: HeatMap) -> dict[str, Figure]:
    """The two panels of the paper, and the blocks as numbers."""
    return {"heatmap": _panels(result), "heatmap_blocks": _blocks(result)}


def _shown(result: HeatMap) -> dict[str, tuple[np.ndarray, list[str], list[int]]]:
    """Panels: title to values, block names and block sizes in pixels."""
    sizes = dict(zip(result.names, result.sizes, strict=True))
    panels = {"Transformer Block": (result.picture, result.names, [n // CELL for n in result.sizes])}
    if result.attention_names:
        values = colors(result.attention)
        panels["Self-Attention"] = (
            values,
            result.attention_names,
            [sizes[name] for name in result.attention_names],
        )
    return panels


def _panels(result: HeatMap) -> Figure:
    import matplotlib.pyplot as plt

    panels = _shown(result)
    figure, axes = plt.subplots(
        1, len(panels), figsize=(7.2 * len(panels) + 1, 7.4), layout="constrained", squeeze=False
    )
    image = None
    for ax, (title, (values, names, sizes)) in zip(axes[0], panels.items(), strict=True):
        image = entries_map(ax, values, names, sizes, result.limits)
        ax.set_title(title, fontsize=17, pad=10)
    bar = figure.colorbar(image, ax=list(axes[0]), shrink=0.8, pad=0.02)  # pyright: ignore[reportArgumentType]
    bar.set_label(LABEL, fontsize=13)
    return figure


def _blocks(result: HeatMap) -> Figure:
    import matplotlib.pyplot as plt

    low, high = result.limits
    values = colors(result.median_abs)
    side = 1.6 + 0.62 * len(result.names)
    figure, ax = plt.subplots(figsize=(side + 1.2, side), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.15)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
    image = ax.imshow(values, vmin=low, vmax=high, cmap="viridis")
    ax.set_xticks(range(len(result.names)), result.names, rotation=90)
    ax.set_yticks(range(len(result.names)), result.names)
    ax.tick_params(length=0)
    for (i, j), value in np.ndenumerate(result.median_abs):
        dark = values[i, j] < (low + high) / 2 + 0.6
        ax.text(
            j, i, cell_text(value), ha="center", va="center", fontsize=8, color="white" if dark else "black"
        )
    ax.spines[:].set_linewidth(0)
    figure.colorbar(image, ax=ax, label="log10(median |entry| + 1e-6)", shrink=0.8)
    return figure


def scenes(result: HeatMap) -> dict[str, Scene]:
    """The two panels for a browser; a block says its numbers when pointed at."""
    import matplotlib.pyplot as plt

    figure = _panels(result)
    found = scene(figure)
    plt.close(figure)
    for number, (_, names, sizes) in enumerate(_shown(result).values(), start=1):
        key = "" if number == 1 else str(number)
        edges = [-0.5, *(np.cumsum(sizes) - 0.5).tolist()]
        found["data"].append(
            {
                "type": "heatmap", "x": edges, "y": edges, "z": [[0] * len(names)] * len(names), "opacity": 0,
                "showscale": False, "text": _words(result, names), "xaxis": f"x{key}", "yaxis": f"y{key}",
                "hovertemplate": "%{text}<extra></extra>",
            }
        )  # fmt: skip
    low, high = result.limits
    bar = {"title": {"text": LABEL, "side": "right"}, "len": 0.8}
    marker = {"colorscale": "Viridis", "cmin": low, "cmax": high, "color": [low], "colorbar": bar}
    found["data"].append({"type": "scatter", "mode": "markers", "x": [None], "y": [None], "marker": marker,
                          "showlegend": False, "hoverinfo": "skip"})  # fmt: skip
    return {"heatmap": found}


def _words(result: HeatMap, names: Sequence[str]) -> list[list[str]]:
    place = [result.names.index(name) for name in names]
    return [
        [
            f"{result.names[i]} × {result.names[j]}<br>Frobenius {result.frobenius[i, j]:.4g}<br>"
            f"mean {result.mean_abs[i, j]:.3g}, median {result.median_abs[i, j]:.3g}, "
            f"max {result.max_abs[i, j]:.3g}"
            for j in place
        ]
        for i in place
    ]
