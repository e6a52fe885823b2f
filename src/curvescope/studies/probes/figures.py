"""The figures of the study `probes`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.viz import geometry as viz

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.studies.probes.study import Probes


def draw(result: Probes) -> dict[str, Figure]:
    """Strength of keys and values, by name."""
    return {"key_strength": _keys(result), "value_strength": _values(result)}


def _keys(result: Probes) -> Figure:
    import matplotlib.pyplot as plt

    count = len(result.keys)
    figure, axes = plt.subplots(
        count, 2, figsize=(11, 2.3 * count + 0.4), layout="constrained", squeeze=False
    )
    for row, p in zip(axes, result.keys, strict=True):
        names = [f"h{h}" for h in range(p.ids.shape[1])]
        for ax, values, label in (
            (row[0], p.z, "σ above random"),
            (row[1], p.fraction, "fraction of the most"),
        ):
            columns = [values[:, h, 0] for h in range(len(names))]
            viz.box_per_head(ax, columns, names, title=f"L{p.layer}: nearest key", label=label)
    return figure


def _values(result: Probes) -> Figure:
    import matplotlib.pyplot as plt

    count = len(result.values)
    figure, axes = plt.subplots(
        count, 2, figsize=(11, 2.3 * count + 0.4), layout="constrained", squeeze=False
    )
    for row, p in zip(axes, result.values, strict=True):
        names = [*(f"h{h}" for h in range(p.ids.shape[1] - 1)), "sum"]
        panels = ((row[0], p.norms, "length of the update"), (row[1], p.z[:, :, 0], "σ above random"))
        for ax, values, label in panels:
            columns = [values[:, h] for h in range(len(names))]
            viz.box_per_head(ax, columns, names, title=f"L{p.layer}: value written", label=label)
    return figure
