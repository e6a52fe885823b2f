"""The tables of the study `probes`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.studies.heads.study import joined

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.geometry.probes import KeyProbe, ValueProbe
    from curvescope.studies.probes.study import Probes

BEST = 3  # words per head


def make(result: Probes) -> dict[str, pd.DataFrame]:
    """For every head the words that stand out most."""
    import pandas as pd

    return {
        "keys": pd.DataFrame([row for p in result.keys for row in _rows(p, "nearest keys")]),
        "values": pd.DataFrame([row for p in result.values for row in _rows(p, "reads as")]),
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
