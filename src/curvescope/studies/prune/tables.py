"""The tables of the study `prune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from curvescope.studies.prune.correlations import PREDICTORS, measured, of_effects, rows
from curvescope.studies.prune.removals import Sets

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.prune.study import Pruned


def frames(result: Pruned) -> dict[str, pd.DataFrame]:
    """By name."""
    import pandas as pd

    found = {"sets": _set_rows(result), "ranks": _rank_rows(result), "samples": _sample_rows(result)}
    if result.heads:
        found["heads"] = _head_rows(result)
    return {name: pd.DataFrame(values) for name, values in found.items()}


def every_set(result: Pruned, key: str) -> list[Sets]:
    """Those of a block, at once and iterated."""
    return [result.sets[key], *([result.rounds[key]] if key in result.rounds else [])]


def _set_rows(result: Pruned) -> list[dict[str, Any]]:
    found = []
    for name in result.sets:
        for sets in every_set(result, name):
            for i, method in enumerate(sets.methods):
                effects = sets.at(method)
                for j, sparsity in enumerate(sets.sparsities):
                    held, own = effects.interval("held_out", j), effects.interval("measured", j)
                    found.append(
                        {
                            "block": name,
                            "method": method,
                            "sparsity": sparsity,
                            "saliencies": sets.own[i, j],
                            "first_order": effects.first[j].mean(),
                            "second_order": effects.second[j].mean(),
                            "predicted": effects.predicted[j].mean(),
                            "measured": own.value,
                            "measured_low": own.low,
                            "measured_high": own.high,
                            "held_out": held.value,
                            "held_out_low": held.low,
                            "held_out_high": held.high,
                            "residual": sets.residual[i, j],
                        }
                    )
    return found


def _rank_rows(result: Pruned) -> list[dict[str, Any]]:
    return [
        {
            "removed": row.removed,
            "how": row.how,
            "predictor": row.predictor,
            "formula": PREDICTORS[row.predictor],
            "spearman": row.correlation.value,
            "spearman_low": row.correlation.low,
            "spearman_high": row.correlation.high,
            "removals": row.correlation.count,
        }
        for row in rows(result)
    ]


def _sample_rows(result: Pruned) -> list[dict[str, Any]]:
    found = []
    for kind, samples in (("single weights", result.singles), ("random groups", result.groups)):
        for name, some in samples.items():
            for how in ("plain", "compensated"):
                effects, truth = of_effects(some, how), measured(some, how)
                for k in range(len(truth)):
                    found.append(
                        {
                            "block": name,
                            "removed": kind,
                            "how": how,
                            "magnitude": some.magnitude[k],
                            "fisher": some.fisher[k],
                            "obd": some.obd[k],
                            "obs": some.obs[k],
                            "first_order": effects.first[k].mean(),
                            "second_order": effects.second[k].mean(),
                            "measured": truth[k],
                        }
                    )
    return found


def _head_rows(result: Pruned) -> list[dict[str, Any]]:
    found = []
    for heads in result.heads.values():
        for h in range(len(heads.obs)):
            row: dict[str, Any] = {"head": f"L{heads.layer}.h{h}", "fisher": heads.fisher[h]}
            row |= {"obd": heads.obd[h], "obs": heads.obs[h]}
            for how in ("plain", "compensated"):
                effects = of_effects(heads, how)
                held = effects.interval("held_out", h)
                row |= {
                    f"{how}_first_order": effects.first[h].mean(),
                    f"{how}_second_order": effects.second[h].mean(),
                    f"{how}_measured": effects.measured[h].mean(),
                    f"{how}_held_out": held.value,
                    f"{how}_held_out_low": held.low,
                    f"{how}_held_out_high": held.high,
                }
            found.append(row | {"residual": heads.residual[h]})
    return found
