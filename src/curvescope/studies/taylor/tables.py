"""The tables of the study `taylor`, from its arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.operators.taylor.expansion import NAMES

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.algorithms import QuadraticDescent
    from curvescope.operators import LossLine
    from curvescope.studies.taylor.descent import Descent
    from curvescope.studies.taylor.study import Taylor


def make(found: Taylor) -> dict[str, pd.DataFrame]:
    """Every table by name."""
    import pandas as pd

    lines = [one.to_frame().assign(direction=name) for name, one in found.lines.items()]
    tables = {
        "radii": pd.DataFrame(radii(found)),
        "lines": pd.concat(lines, ignore_index=True),
    }
    if found.plane is not None:
        tables["plane"] = found.plane.to_frame()
    if found.predicted is not None:
        rows = steps("the model", found.predicted, found.descents)
        own = found.settled
        rows += steps("settled", own.predicted, own.descents) if own is not None else []
        tables["descent"] = pd.DataFrame(rows)
        tables["ceiling"] = pd.DataFrame(ceiling(found))
    return tables


def radii(found: Taylor) -> list[dict[str, Any]]:
    """One row per direction, prediction and side."""
    return [row for name, one in found.lines.items() for row in _radii(name, one)]


def _radii(name: str, one: LossLine) -> list[dict[str, Any]]:
    e, rows = one.expansion, []
    for order in one.orders:
        for side, radius in one.radii[NAMES[order]].items():
            t = radius.value * (1 if side == "ahead" else -1)
            rows.append(
                {
                    "direction": name,
                    "prediction": NAMES[order],
                    "side": side,
                    "holds": radius.words(),
                    "t": radius.value,
                    "t_low": radius.low,
                    "t_high": radius.high,
                    "distance": radius.value * one.length,
                    "distance/|theta|": radius.value * one.length / one.theta_length
                    if one.theta_length
                    else np.nan,
                    "predicted_change": float(e.predicted(np.array(t), order)) - e.loss,
                    "slope": e.slope,
                    "curvature": e.curvature,
                    "third": e.third,
                    "|d|": one.length,
                    "rounding": one.agreement.rounding,
                }
            )
    return rows


def steps(where: str, predicted: QuadraticDescent, descents: list[Descent]) -> list[dict[str, Any]]:
    """One row per learning rate and step."""
    rows = []
    for i, one in enumerate(descents):
        errors = one.errors(predicted.change[i])
        for k in range(len(one.change)):
            rows.append(
                {
                    "where": where,
                    "share": one.share,
                    "learning_rate": one.learning_rate,
                    "step": k,
                    "change": one.change[k],
                    "change_predicted": predicted.change[i, k],
                    "error": errors[k],
                    "gradient_norm": one.gradient_norm[k],
                    "gradient_norm_predicted": predicted.gradient_norm[i, k],
                    "along_top": one.along[k],
                }
            )
    return rows


def ceiling(found: Taylor) -> list[dict[str, Any]]:
    """One row per place and learning rate: how descent went, and how it was predicted to go."""
    rows = []
    places = [("the model", found.predicted, found.descents, float(found.sharpest[0]))]
    if found.settled is not None:
        own = found.settled
        places.append(("settled", own.predicted, own.descents, own.sharpest))
    for where, predicted, descents, top in places:
        assert predicted is not None
        for i, one in enumerate(descents):
            K, last = len(one.change) - 1, one.num_finite - 1
            rows.append(
                {
                    "where": where,
                    "share": one.share,
                    "learning_rate": one.learning_rate,
                    "λ_max": top,
                    "steps": last,
                    "along_top": abs(one.along[last] / one.along[0]) if one.along[0] else np.nan,
                    "along_top_predicted": abs(1 - 2 * one.share) ** K,
                    "change": one.change[last],
                    "change_predicted": predicted.change[i, K],
                    "steps_within_5%": one.steps_within(predicted.change[i]),
                    "diverged": one.diverged,
                    "λ_max_after": one.sharpness,
                }
            )
    return rows
