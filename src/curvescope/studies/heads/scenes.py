"""The scene of the study `heads`: a score of every head, from its arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.viz.interactive import Scene
from curvescope.viz.scenes import Cell, grid_map, switched

if TYPE_CHECKING:
    from curvescope.geometry.attention.directions import HeadDirections
    from curvescope.studies.heads.study import Heads

RANKS = {
    "QK rank": ("qk_spectra", "effective rank of W_QK"),
    "VO rank": ("vo_spectra", "effective rank of W_VO"),
}
COPYING, BIAS = "copying", "query bias"
LABELS = {COPYING: "copying score Re Σλ / Σ|λ|", BIAS: "share of the query's bias"}


def scenes(result: Heads) -> dict[str, Scene]:
    """Layers × heads."""
    choices = [*RANKS, COPYING, *([BIAS] if result.has_bias else [])]
    return {"scores": switched({"score": choices}, lambda score: _scores(result, score))}


def _values(layer: HeadDirections, score: str) -> list[float]:
    if score in RANKS:
        return getattr(layer, RANKS[score][0]).effective_rank.tolist()
    return (layer.copying if score == COPYING else layer.bias_share).tolist()


def _scores(result: Heads, score: str) -> Scene:
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
