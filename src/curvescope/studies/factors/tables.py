"""The tables of the study `factors`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.factors import claims
from curvescope.studies.factors.distances import MEASURES

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.factors.study import Factors


def frames(result: Factors) -> dict[str, pd.DataFrame]:
    """By name."""
    import pandas as pd

    found = {
        "whole": _whole(result),
        "parts": _parts(result),
        "correlations": claims.table(result),
        "claims": [c._asdict() for c in result.claims()],
    }
    if result.tuned:
        found |= {"optimizers": optimizers(result), "trials": _trials(result)}
    return {name: pd.DataFrame(rows) for name, rows in found.items()}


def _whole(result: Factors) -> list[dict[str, Any]]:
    """One row for every seed, checkpoint and approximation."""
    return [
        {"seed": s, "step": step, "loss": float(result.loss[s, k]), "approximation": name}
        | {measure: float(result.whole[s, k, q, m]) for q, measure in enumerate(MEASURES)}
        | {"decrease": float(result.decrease[s, k, m])}
        for s in range(len(result.loss))
        for k, step in enumerate(result.checkpoints)
        for m, name in enumerate(result.approximations)
    ]


def _parts(result: Factors) -> list[dict[str, Any]]:
    """Means over seeds, one row for every checkpoint, block and approximation."""
    mean = result.parts.mean(axis=0)
    return [
        {"step": step, "block": block, "size": size, "approximation": name}
        | {measure: float(mean[k, q, m, b]) for q, measure in enumerate(MEASURES)}
        for k, step in enumerate(result.checkpoints)
        for b, (block, size) in enumerate(zip(result.blocks, result.sizes, strict=True))
        for m, name in enumerate(result.approximations)
    ]


def optimizers(result: Factors) -> list[dict[str, Any]]:
    """One row for every approximation: its settings, its loss at the end, its mean distances."""
    found = []
    for m, tuned in enumerate(result.tuned):
        ends = result.final[:, m]
        row: dict[str, Any] = {"approximation": tuned.method, "lr": tuned.rate, "damping": tuned.damping}
        row |= {"settled": tuned.settled, "diverged": int((~np.isfinite(ends)).sum())}
        row |= dict(zip(("loss", "low", "high"), geometric(ends), strict=True))
        mean = result.whole.mean(axis=(0, 1))
        found.append(row | {measure: float(mean[q, m]) for q, measure in enumerate(MEASURES)})
    return found


def geometric(values: np.ndarray) -> tuple[float, float, float]:
    """Geometric mean over seeds, with Student's interval of the logarithm."""
    one = claims.mean_of(np.log(values))
    mean, low, high = (float(np.exp(value)) for value in one)
    return mean, low, high


def _trials(result: Factors) -> list[dict[str, Any]]:
    """Every trial of the tuning."""
    return [
        {"approximation": one.method, "lr": float(rate), "damping": float(damping), "loss": float(loss)}
        | {"chosen": rate == one.rate and damping == one.damping}
        for one in result.tuned
        for rate, damping, loss in zip(one.rates, one.dampings, one.loss, strict=True)
    ]
