"""The tables of the study `influence`, from its arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.algorithms.estimates.ranks import spearman
from curvescope.studies.influence.correlations import over_queries, slope

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.influence.study import Comparison, Influence

WIDTH = 60  # characters of a text in a table


def frames(result: Influence) -> dict[str, pd.DataFrame]:
    """Every table by name."""
    import pandas as pd

    found = {"sequences": pd.DataFrame(sequences(result)), "dampings": pd.DataFrame(dampings(result))}
    if result.comparisons:
        found["ranks"] = pd.DataFrame(ranks(result))
        found["removed"] = pd.DataFrame(removed(result))
        found["claims"] = pd.DataFrame(
            [{"claim": c.claim, "measured": c.measured, "verdict": c.verdict} for c in result.claims()]
        )
    return found


def short(text: str, width: int = WIDTH) -> str:
    """A text on one line, its middle left out where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width // 2 - 1]}…{line[-width // 2 :]}"


def sequences(result: Influence) -> list[dict[str, Any]]:
    """One row per query and training sequence: the most helpful first, the most harmful last."""
    rows = []
    for number, scores in enumerate(result.scores):
        order = np.argsort(-scores.values[0], kind="stable")
        for place, i in enumerate(order, start=1):
            rows.append(
                {
                    "query": number + 1,
                    "rank": place,
                    "score": scores.values[0, i],
                    "±": scores.error[0, i],
                    "says": says(scores.values[0, i], scores.error[0, i]),
                    "sequence": int(scores.sequences[i]),
                    "text": short(result.texts[scores.sequences[i]]),
                }
            )
    return rows


def says(score: float, error: float) -> str:
    """Whether a sequence has helped, as far as the residual lets one say."""
    return "not decided" if abs(score) <= error else "helped" if score > 0 else "harmed"


def dampings(result: Influence) -> list[dict[str, Any]]:
    """One row per query and damping: its system, and how alike its order is to that of the chosen one."""
    return [
        {
            "query": number + 1,
            "mean diagonals": unit,
            "δ": scores.damping[d],
            "ρ with the first": float(spearman(scores.values[0], scores.values[d])),
            "largest |score|": float(np.abs(scores.values[d]).max()),
            "largest ±": float(scores.error[d].max()),
            "residual": scores.residual[d],
            "converged": bool(scores.converged[d]),
            "products": int(scores.num_products[d]),
        }
        for number, scores in enumerate(result.scores)
        for d, unit in enumerate(result.units)
    ]


def ranks(result: Influence) -> list[dict[str, Any]]:
    """One row per small model, method and way of training without a sequence."""
    rows = []
    for name, one in result.comparisons.items():
        for method, predicted in one.predicted.items():
            for trained in ("near", "again"):
                rows.append(_rank_row(result, name, one, method, predicted, trained))
    return rows


def _rank_row(
    result: Influence, name: str, one: Comparison, method: str, predicted: np.ndarray, trained: str
) -> dict[str, Any]:
    how: dict[str, Any] = {"draws": result.draws, "seed": result.seed}
    measured = getattr(one, trained)
    found, size = over_queries(predicted, measured, **how), slope(predicted, measured, **how)
    return {
        "model": name,
        "method": method,
        "trained": trained,
        "ρ": found.value,
        "ρ_low": found.low,
        "ρ_high": found.high,
        "measured/predicted": size.value,
        "low": size.low,
        "high": size.high,
        "residual": one.residual.get(method, np.nan),
    }


def removed(result: Influence) -> list[dict[str, Any]]:
    """One row per small model, query and sequence that was left out."""
    rows = []
    for name, one in result.comparisons.items():
        for q in range(one.near.shape[0]):
            for r, sequence in enumerate(one.removed.tolist()):
                predicted = {method: values[q, r] for method, values in one.predicted.items()}
                rows.append(
                    {
                        "model": name,
                        "query": q + 1,
                        "sequence": sequence,
                        "text": one.texts[r],
                        "near": one.near[q, r],
                        "again": one.again[q, r],
                        **predicted,
                        "moved, near": one.moved[r, 0],
                        "moved, again": one.moved[r, 1],
                        "elsewhere": bool(one.elsewhere[r]),
                    }
                )
    return rows
