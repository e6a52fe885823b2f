"""The tables of the study `heads`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.studies.heads.study import joined

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.geometry.attention.directions import Directions, HeadDirections
    from curvescope.studies.heads.study import Heads

BEST = 30  # pairs of heads in the table of compositions


def make(result: Heads) -> dict[str, pd.DataFrame]:
    """Numbers of the heads, their directions, biases and compositions."""
    import pandas as pd

    found = {
        "heads": pd.DataFrame([row for layer in result.layers for row in _numbers(layer, result.has_bias)]),
        "qk": pd.DataFrame([row for i in range(len(result.layers)) for row in _pairs(result, i, "qk")]),
        "vo": pd.DataFrame([row for i in range(len(result.layers)) for row in _pairs(result, i, "vo")]),
    }
    if result.has_bias:
        found["key_bias"] = pd.DataFrame([row for layer in result.layers for row in _bias(layer)])
    if result.compositions:
        found["composition"] = _composition(result)
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
    """Both sides of every pair of a layer; with data, how much of what happens there goes through it."""
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


def _composition(result: Heads) -> pd.DataFrame:
    """The pairs farthest above chance."""
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
