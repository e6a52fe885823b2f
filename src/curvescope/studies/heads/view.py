"""Tables and figures of the study `heads`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.runs.study_result import Tables
from curvescope.studies.heads.study import joined
from curvescope.viz import geometry as viz
from curvescope.viz import style
from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Cell, grid_map, switched

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from curvescope.geometry.attention.directions import Directions, HeadDirections
    from curvescope.studies.heads.study import Heads

BEST = 30  # pairs of heads in the table of compositions


def tables(result: Heads) -> Tables:
    """Return numbers of the heads, their directions, biases and compositions."""
    found: Tables = {
        "heads": [row for layer in result.layers for row in _numbers(layer, result.has_bias)],
        "qk": [row for i in range(len(result.layers)) for row in _pairs(result, i, "qk")],
        "vo": [row for i in range(len(result.layers)) for row in _pairs(result, i, "vo")],
    }
    if result.has_bias:
        found["key_bias"] = [row for layer in result.layers for row in _bias(layer)]
    if result.compositions:
        found["composition"] = _table_composition(result)
    return found


def _numbers(layer: HeadDirections, has_bias: bool) -> list[dict[str, object]]:
    return [
        {
            "head": f"L{layer.layer}.h{h}",
            "s₁ QK": layer.qk_spectra.singular_values[h, 0] if layer.qk_spectra.rank[h] else 0.0,
            "effective rank QK": layer.qk_spectra.effective_rank[h],
            "99 % QK": int(layer.qk_spectra.num_99[h]),
            "s₁ VO": layer.vo_spectra.singular_values[h, 0] if layer.vo_spectra.rank[h] else 0.0,
            "effective rank VO": layer.vo_spectra.effective_rank[h],
            "99 % VO": int(layer.vo_spectra.num_99[h]),
            "copying": layer.copying[h],
            **({"|k₀|": layer.key_bias_size[h], "bias share": layer.bias_share[h]} if has_bias else {}),
        }
        for h in range(layer.num_heads)
    ]


def _pairs(result: Heads, i: int, circuit: str) -> list[dict[str, object]]:
    """Return both sides of every pair of a layer; with data, also its share of the energy."""
    found: Directions = getattr(result.layers[i], circuit)
    on_data = result.energies[i].share(circuit) if result.energies else None
    sides = found.left.ids.shape[1]
    return [
        {
            "head": f"L{result.layers[i].layer}.h{found.head[p]}",
            "pair": int(found.rank[p]),
            "s": found.singular_value[p],
            "share of s²": found.share[p],
            **({} if on_data is None else {"share on data": on_data[found.head[p], found.rank[p]]}),
            "side": "+-"[side],
            "left": joined(found.left.text[p][side], found.left.bytes[p][side]),
            "right": joined(found.right.text[p][side], found.right.bytes[p][side]),
        }
        for p in range(len(found.head))
        for side in range(sides)
    ]


def _bias(layer: HeadDirections) -> list[dict[str, object]]:
    return [
        {
            "head": f"L{layer.layer}.h{h}",
            "|k₀|": layer.key_bias_size[h],
            "preferred": joined(layer.key_bias.text[h][0], layer.key_bias.bytes[h][0]),
            "avoided": joined(layer.key_bias.text[h][1], layer.key_bias.bytes[h][1]),
        }
        for h in range(layer.num_heads)
        if layer.key_bias_size[h]
    ]


def _table_composition(result: Heads) -> pd.DataFrame:
    """Return the pairs farthest above chance."""
    import pandas as pd

    rows = [
        {
            "kind": c.kind,
            "from": f"L{c.layers[0]}.h{i}",
            "to": f"L{c.layers[1]}.h{j}",
            "score": c.scores[i, j],
            "chance": c.chance_mean[i, j],
            "standard deviations": c.z[i, j],
        }
        for c in result.compositions
        for i, j in np.ndindex(c.scores.shape)
    ]
    frame = pd.DataFrame(rows).sort_values("standard deviations", ascending=False, kind="stable")
    return frame.head(BEST).reset_index(drop=True)


def figures(result: Heads) -> dict[str, Figure]:
    """Draw spectra, scores of the heads, and compositions if there are two layers."""
    found = {"spectra": _spectra(result), "scores": _figure_scores(result)}
    return found | ({"composition": _figure_composition(result)} if result.compositions else {})


def _spectra(result: Heads) -> Figure:
    """Draw one row per layer: singular values and coverage of QK, then of VO."""
    count = len(result.layers)
    figure, axes = style.subplots(count, 4, figsize=(14, 2.7 * count + 0.2), squeeze=False)
    of = "Σ s" if result.legacy else "Σ s²"
    for row, layer in zip(axes, result.layers, strict=True):
        for j, (name, s) in enumerate((("W_QK", layer.qk_spectra), ("W_VO", layer.vo_spectra))):
            title = f"L{layer.layer} {name}"
            if not s.singular_values.size:
                continue
            viz.spectra(row[2 * j], s.singular_values, title=title)
            viz.coverage(row[2 * j + 1], s.coverage, title=f"{title}, coverage", num_99=s.num_99, of=of)
            legend = row[2 * j + 1].get_legend()
            if legend is not None:
                legend.remove()
    for ax in axes[:-1].flat:
        ax.set_xlabel("")
    return figure


def _figure_scores(result: Heads) -> Figure:
    layers = [layer.layer for layer in result.layers]
    panels = {
        "effective rank of W_QK": (np.stack([x.qk_spectra.effective_rank for x in result.layers]), None),
        "effective rank of W_VO": (np.stack([x.vo_spectra.effective_rank for x in result.layers]), None),
        "copying score": (np.stack([x.copying for x in result.layers]), (-1.0, 1.0)),
    }
    if result.has_bias:
        panels["share of the query's bias"] = (np.stack([x.bias_share for x in result.layers]), (0.0, 1.0))
    width = 3.0 + 0.34 * result.layers[0].num_heads
    figure, axes = style.panels(len(panels), 2, (width, 1.1 + 0.3 * len(layers)))
    for ax, (title, (values, limits)) in zip(axes, panels.items(), strict=True):
        viz.head_map(ax, values, layers, title=title, limits=limits)
    return figure


def _figure_composition(result: Heads) -> Figure:
    """Draw all earlier heads against all later ones, for queries, keys and values."""
    kinds = list(dict.fromkeys(c.kind for c in result.compositions))
    layers = [layer.layer for layer in result.layers]
    H = result.layers[0].num_heads
    senders = [f"L{i}.h{h}" for i in layers[:-1] for h in range(H)]
    receivers = [f"L{j}.h{h}" for j in layers[1:] for h in range(H)]
    limit = max(4.0, max(float(np.nanmax(np.abs(c.z))) for c in result.compositions))
    side = min(2.2 + 0.2 * len(senders), 6.5)
    figure, axes = style.subplots(1, len(kinds), figsize=(side * len(kinds) + 0.8, side))
    image: Any = None
    for ax, kind in zip(np.atleast_1d(axes), kinds, strict=True):
        z = np.full((len(senders), len(receivers)), np.nan)
        for c in result.compositions:
            if c.kind == kind:
                i, j = layers.index(c.layers[0]), layers.index(c.layers[1]) - 1  # pyright: ignore[reportArgumentType]
                z[i * H : (i + 1) * H, j * H : (j + 1) * H] = c.z
        image = viz.composition_map(ax, z, senders, receivers, title=f"{kind}-composition", limit=limit)
    figure.colorbar(
        image, ax=list(np.atleast_1d(axes)), label="standard deviations above chance", shrink=0.85
    )
    return figure


RANKS = {
    "QK rank": ("qk_spectra", "effective rank of W_QK"),
    "VO rank": ("vo_spectra", "effective rank of W_VO"),
}
COPYING, BIAS = "copying", "query bias"
LABELS = {COPYING: "copying score Re Σλ / Σ|λ|", BIAS: "share of the query's bias"}


def scenes(result: Heads) -> dict[str, Scene]:
    """Return maps of layers × heads."""
    choices = [*RANKS, COPYING, *([BIAS] if result.has_bias else [])]
    return {"scores": switched({"score": choices}, lambda score: _scene_scores(result, score))}


def _values(layer: HeadDirections, score: str) -> list[float]:
    if score in RANKS:
        return getattr(layer, RANKS[score][0]).effective_rank.tolist()
    return (layer.copying if score == COPYING else layer.bias_share).tolist()


def _scene_scores(result: Heads, score: str) -> Scene:
    label = RANKS[score][1] if score in RANKS else LABELS[score]
    cells = [
        [
            Cell(value, f"<b>L{layer.layer}.h{head}</b><br>{label}: {value:.3g}")
            for head, value in enumerate(_values(layer, score))
        ]
        for layer in result.layers
    ]
    rows = [f"L{layer.layer}" for layer in result.layers]
    columns = [str(head) for head in range(max(len(row) for row in cells))]
    limits = {COPYING: (-1.0, 1.0), BIAS: (0.0, 1.0)}.get(score)
    colors = "signed linear" if score == COPYING else "linear"
    return grid_map(rows, columns, cells, label=label, colors=colors, limits=limits, titles=("head", ""))
