"""Figures of the study `layernorm`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz import geometry as viz
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.studies.layernorm.study import LayerNorms

MOST_PANELS = 8


def figures(result: LayerNorms) -> dict[str, Figure]:
    """Return the figures: a sketch in the plane, the axes, outputs on the ellipsoids, and the keys."""
    panels = {"picture": _picture(result), "axes": _axes(result), "states": _states(result)}
    return panels | ({"selectable": _selectable(result)} if result.selectable else {})


def _picture(result: LayerNorms) -> Figure:
    figure, axes = style.subplots(1, 4, figsize=(13, 3.7))
    viz.four_panels(list(axes), seed=result.seed)
    return figure


def _axes(result: LayerNorms) -> Figure:
    """One panel per kind of norm."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    for n in result.norms:
        kind = {"ln1": "at attention", "ln2": "at the feed-forward"}
        groups.setdefault(kind.get(n.role[-3:], "outside the blocks"), {})[n.role] = n.ellipsoid.semi_axes
    figure, axes = style.subplots(
        1, len(groups), figsize=(4.6 * len(groups), 3.5), squeeze=False, sharey=True
    )
    for ax, (title, lengths) in zip(axes[0], groups.items(), strict=True):
        viz.semi_axes(ax, lengths, radius=np.sqrt(result.d), title=title)
    for ax in axes[0][1:]:
        ax.set_ylabel("")
    return figure


def _states(result: LayerNorms) -> Figure:
    chosen = result.norms
    if len(chosen) > MOST_PANELS:
        at = np.unique(np.linspace(0, len(chosen) - 1, MOST_PANELS).round().astype(int))
        chosen = [chosen[i] for i in at]
    figure, axes = style.panels(len(chosen), 4, (3.2, 3))
    for ax, n in zip(axes, chosen, strict=True):
        first, second = (*n.ellipsoid.semi_axes[:2], 0.0, 0.0)[:2]
        viz.ellipsoid_shadow(ax, n.on_axes, float(first), float(second), title=n.role)
    return figure


def _selectable(result: LayerNorms) -> Figure:
    names = [f"L{s.layer}.h{h}" for s in result.selectable for h in range(len(s.with_gain))]
    forms = {"with γ": "with_gain", "with γ = 1": "without_gain", "without a norm": "without_norm"}
    width = min(3.0 + 0.22 * len(names), 6.5)
    figure, axes = style.subplots(1, 3, figsize=(3 * width, 3), sharey=True)
    shares = {
        title: np.concatenate([1 - getattr(s, field).mean(1) for s in result.selectable])
        for title, field in forms.items()
    }
    crowded = "almost coincide with another", np.concatenate([s.crowded.mean(1) for s in result.selectable])
    most = max(float(share.max()) for share in shares.values())
    for ax, (title, share) in zip(axes, shares.items(), strict=True):
        options = {"title": title, "label": "keys no query selects (%)", "most": most}
        viz.share_per_name(ax, names, share, part=crowded if ax is axes[0] else None, **options)
    for ax in axes[1:]:
        ax.set_ylabel("")
    return figure
