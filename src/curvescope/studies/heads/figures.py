"""The figures of the study `heads`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.viz import geometry as viz

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.studies.heads.study import Heads


def draw(result: Heads) -> dict[str, Figure]:
    """Spectra, scores of the heads, and compositions where there are two layers."""
    found = {"spectra": _spectra(result), "scores": _scores(result)}
    return found | ({"composition": _composition(result)} if result.compositions else {})


def _spectra(result: Heads) -> Figure:
    """One row per layer: singular values and coverage of QK, then of VO."""
    import matplotlib.pyplot as plt

    count = len(result.layers)
    figure, axes = plt.subplots(
        count, 4, figsize=(14, 2.7 * count + 0.2), layout="constrained", squeeze=False
    )
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


def _scores(result: Heads) -> Figure:
    import matplotlib.pyplot as plt

    layers = [layer.layer for layer in result.layers]
    panels = {
        "effective rank of W_QK": (np.stack([x.qk_spectra.effective_rank for x in result.layers]), None),
        "effective rank of W_VO": (np.stack([x.vo_spectra.effective_rank for x in result.layers]), None),
        "copying score": (np.stack([x.copying for x in result.layers]), (-1.0, 1.0)),
    }
    if result.has_bias:
        panels["share of the query's bias"] = (np.stack([x.bias_share for x in result.layers]), (0.0, 1.0))
    width = 3.0 + 0.34 * result.layers[0].num_heads
    figure, axes = plt.subplots(
        2, 2, figsize=(2 * width, 2 * (1.1 + 0.3 * len(layers))), layout="constrained"
    )
    for ax, (title, (values, limits)) in zip(axes.flat, panels.items(), strict=False):
        viz.head_map(ax, values, layers, title=title, limits=limits)
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    return figure


def _composition(result: Heads) -> Figure:
    """All earlier heads against all later ones, for queries, keys and values."""
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(c.kind for c in result.compositions))
    layers = [layer.layer for layer in result.layers]
    H = result.layers[0].num_heads
    senders = [f"L{i}.h{h}" for i in layers[:-1] for h in range(H)]
    receivers = [f"L{j}.h{h}" for j in layers[1:] for h in range(H)]
    limit = max(4.0, max(float(np.nanmax(np.abs(c.z))) for c in result.compositions))
    side = min(2.2 + 0.2 * len(senders), 6.5)
    figure, axes = plt.subplots(1, len(kinds), figsize=(side * len(kinds) + 0.8, side), layout="constrained")
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
