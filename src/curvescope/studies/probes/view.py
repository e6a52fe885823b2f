"""Tables and figures of the study `probes`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.runs.study_result import Tables
from curvescope.studies.heads.study import joined
from curvescope.viz import geometry as viz
from curvescope.viz import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.geometry.probes import KeyProbe, ValueProbe
    from curvescope.studies.probes.study import Probes

BEST = 3  # words listed per head


def tables(result: Probes) -> Tables:
    """Return, for every head, the words with the highest scores."""
    return {
        "keys": [row for p in result.keys for row in _rows(p, "nearest keys")],
        "values": [row for p in result.values for row in _rows(p, "reads as")],
    }


def _rows(probe: KeyProbe | ValueProbe, words: str) -> list[dict[str, object]]:
    rows = []
    norms = getattr(probe, "norms", None)
    count = probe.ids.shape[1]
    for h in range(count):
        name = "sum" if norms is not None and h == count - 1 else f"h{h}"
        order = np.argsort(-np.nan_to_num(probe.z[:, h, 0], nan=-np.inf), kind="stable")
        for i in order[:BEST]:
            row: dict[str, object] = {"head": f"L{probe.layer}.{name}", "word": probe.words[i]}
            row[words] = joined(probe.text[i][h], probe.bytes[i][h])
            row |= {"score": probe.scores[i, h, 0], "cosine": probe.cosine[i, h, 0]}
            row |= {"fraction": probe.fraction[i, h, 0], "z": probe.z[i, h, 0]}
            rows.append(row if norms is None else row | {"|update|": norms[i, h]})
    return rows


def figures(result: Probes) -> dict[str, Figure]:
    """Strength of keys and values, by name."""
    return {"key_strength": _keys(result), "value_strength": _values(result)}


def _keys(result: Probes) -> Figure:
    count = len(result.keys)
    figure, axes = style.subplots(count, 2, figsize=(11, 2.3 * count + 0.4), squeeze=False)
    for row, p in zip(axes, result.keys, strict=True):
        names = [f"h{h}" for h in range(p.ids.shape[1])]
        for ax, values, label in (
            (row[0], p.z, "σ above random"),
            (row[1], p.fraction, "fraction of the highest"),
        ):
            columns = [values[:, h, 0] for h in range(len(names))]
            viz.box_per_head(ax, columns, names, title=f"L{p.layer}: nearest key", label=label)
    return figure


def _values(result: Probes) -> Figure:
    count = len(result.values)
    figure, axes = style.subplots(count, 2, figsize=(11, 2.3 * count + 0.4), squeeze=False)
    for row, p in zip(axes, result.values, strict=True):
        names = [*(f"h{h}" for h in range(p.ids.shape[1] - 1)), "sum"]
        panels = ((row[0], p.norms, "length of the update"), (row[1], p.z[:, :, 0], "σ above random"))
        for ax, values, label in panels:
            columns = [values[:, h] for h in range(len(names))]
            viz.box_per_head(ax, columns, names, title=f"L{p.layer}: value written", label=label)
    return figure
