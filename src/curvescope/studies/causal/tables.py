"""The tables of the study `causal`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.causal.measure import Directions
    from curvescope.studies.causal.study import Causal


def make(result: Causal) -> dict[str, pd.DataFrame]:
    """Every direction with every strength, and the parts of the logits."""
    import pandas as pd

    rows = [row for layer in result.layers for d in range(len(layer.names)) for row in _rows(layer, d)]
    found = {"directions": pd.DataFrame(rows)}
    p = result.parts
    if p.names:
        columns = {"part": p.names, "mean": p.mean, "±": p.stderr, "root mean square": p.size}
        found["attribution"] = pd.DataFrame(columns)
    return found


def _rows(layer: Directions, d: int) -> list[dict[str, object]]:
    """One direction: its strengths, then the ablation."""
    first, second = layer.predicted(1)[d], layer.predicted(2)[d]
    found = []
    for a in range(len(layer.alphas) + 1):
        steered = a < len(layer.alphas)
        alpha = layer.alphas[a] if steered else np.nan
        found.append(
            {
                "direction": layer.names[d],
                "kind": layer.kinds[d],
                "point": layer.at[d],
                "s": layer.singular_value[d],
                "σ": layer.sigma[d],
                "do": "steer" if steered else "ablate",
                "α": alpha,
                "loss change": layer.loss_change[d, a],
                "first order": first[a],
                "second order": second[a],
                "KL": layer.kl[d, a],
                "logits found": layer.logit_change[d, a] if steered else np.nan,
                "logits direct": alpha * layer.logit_direct[d],
                "tokens": layer.tokens[d],
            }
        )
    return found
