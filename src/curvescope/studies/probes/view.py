"""Tables and figures of the study `probes`, made from the arrays of its result."""

from __future__ import annotations

from collections.abc import Sequence
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
    rows = [
        (f"L{p.layer}: nearest key", [f"h{h}" for h in range(p.ids.shape[1])],
         {"σ above random": p.z[:, :, 0], "fraction of the highest": p.fraction[:, :, 0]})
        for p in result.keys
    ]  # fmt: skip
    return _boxes(rows)


def _values(result: Probes) -> Figure:
    rows = [
        (f"L{p.layer}: value written", [*(f"h{h}" for h in range(p.ids.shape[1] - 1)), "sum"],
         {"length of the update": p.norms, "σ above random": p.z[:, :, 0]})
        for p in result.values
    ]  # fmt: skip
    return _boxes(rows)


def _boxes(rows: Sequence[tuple[str, list[str], dict[str, np.ndarray]]]) -> Figure:
    """Draw two panels per layer: the distribution over words (n, heads) of a number, one box per head."""
    figure, axes = style.subplots(len(rows), 2, figsize=(11, 2.3 * len(rows) + 0.4), squeeze=False)
    for row, (title, names, panels) in zip(axes, rows, strict=True):
        for ax, (label, values) in zip(row, panels.items(), strict=True):
            viz.box_per_head(ax, list(values.T), names, title=title, label=label)
    return figure
