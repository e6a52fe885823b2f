"""The tables of the study `quantize`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from curvescope.studies.quantize.correlations import PREDICTORS, rows
from curvescope.studies.quantize.rounding import Roundings
from curvescope.studies.weight_changes import Part

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.quantize.study import Quantized

PARTS: tuple[Part, ...] = ("predicted", "measured", "held_out")


def frames(result: Quantized) -> dict[str, pd.DataFrame]:
    """By name."""
    import pandas as pd

    found = {
        "sensitivity": [*_rows(result.blocks), *_rows({"all": result.together})],
        "ranks": _rank_rows(result),
    }
    if result.exact:
        found["exact"] = _rows(result.exact)
    return {name: pd.DataFrame(values) for name, values in found.items()}


def _rows(parts: dict[str, Roundings]) -> list[dict[str, Any]]:
    """One for every block, number of bits and method."""
    found = []
    for name, one in parts.items():
        for j, bits in enumerate(one.bits):
            for i, method in enumerate(one.methods):
                effects = one.at(method)
                row: dict[str, Any] = {"block": name, "bits": int(bits), "method": method}
                row |= {"error": one.size[i, j], "first_order": effects.first[j].mean()}
                row["second_order"] = effects.second[j].mean()
                for label in PARTS:
                    mean = effects.interval(label, j)
                    row |= {label: mean.value, f"{label}_low": mean.low, f"{label}_high": mean.high}
                found.append(row)
    return found


def _rank_rows(result: Quantized) -> list[dict[str, Any]]:
    return [
        {
            "bits": row.bits,
            "predictor": row.predictor,
            "formula": PREDICTORS[row.predictor],
            "spearman": row.correlation.value,
            "spearman_low": row.correlation.low,
            "spearman_high": row.correlation.high,
            "blocks": row.correlation.count,
        }
        for row in rows(result)
    ]
