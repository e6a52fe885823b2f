"""The tables of the study `why_adam`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.why_adam.claims import SCOPES, changes, correlations
from curvescope.studies.why_adam.comparison import Interval, contrast, verdict
from curvescope.studies.why_adam.curvature import MEASURES
from curvescope.studies.why_adam.networks import FACTORS, pairs
from curvescope.studies.why_adam.work import MOMENTS, OPTIMIZERS

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.why_adam.study import WhyAdam


def frames(result: WhyAdam) -> dict[str, pd.DataFrame]:
    """By name."""
    import pandas as pd

    rows = {
        "gaps": _gaps(result),
        "correlations": _correlations(result),
        "changes": _changes(result),
        "pairs": _pairs(result),
        "heterogeneity": _heterogeneity(result),
        "blocks": _blocks(result),
        "rates": _rates(result),
    }
    return {name: pd.DataFrame(found) for name, found in rows.items()}


def _named(interval: Interval, name: str = "mean") -> dict[str, float]:
    return dict(zip((name, "low", "high"), interval, strict=True))


def _gaps(result: WhyAdam) -> list[dict[str, Any]]:
    """One row for every configuration."""
    found = []
    for name in result.configurations:
        row: dict[str, Any] = {"configuration": name, "parameters": result.curvature[name].num_parameters}
        for optimizer in OPTIMIZERS:
            run = result.runs[f"{name}/{optimizer}"]
            rates, counts = np.unique(run.rates[run.chosen], return_counts=True)
            row[f"lr_{optimizer}"] = float(rates[counts.argmax()])
            row[f"loss_{optimizer}"] = float(run.loss.mean())
        found.append(row | _named(contrast(result.gaps([name])), "gap"))
    return found


def _correlations(result: WhyAdam) -> list[dict[str, Any]]:
    """One row for every correlation."""
    return [
        {"measure": one.measure, "matrix": "H" if one.when == "hessian" else "GGN",
         "when": "start" if one.when == "hessian" else one.when, "among": one.among,
         "rho": one.found.value, "low": one.found.low, "high": one.found.high,
         "configurations": one.found.groups, "above_zero": verdict(one.found.low, one.found.high)}
        for one in correlations(result)
    ]  # fmt: skip


def _changes(result: WhyAdam) -> list[dict[str, Any]]:
    """What each factor changes, over its pairs."""
    return [
        {"from": before, "to": after, "of": of, "scope": scope, "pairs": len(found)}
        | _named(interval, "change")
        for factor, (before, after) in FACTORS.items()
        if (found := pairs(factor, result.configurations))
        for scope, fixed in SCOPES.items()
        for of, interval in changes(result, found, fixed=fixed).items()
    ]


def _pairs(result: WhyAdam) -> list[dict[str, Any]]:
    """What changes in each pair."""
    return [
        {"from": pair[0], "to": pair[1], "of": of} | _named(interval, "change")
        for factor in FACTORS
        for pair in pairs(factor, result.configurations)
        for of, interval in changes(result, [pair], fixed=True).items()
    ]


def _heterogeneity(result: WhyAdam) -> list[dict[str, Any]]:
    """Every measure at every moment."""
    return [
        {"configuration": name, "measure": measure, "matrix": "H" if when == "hessian" else "GGN",
         "when": "start" if when == "hessian" else when}
        | _named(contrast(result.heterogeneity(measure, when, [name])))
        for name in result.configurations
        for measure in MEASURES
        for when in ("hessian", *MOMENTS)
    ]  # fmt: skip


def _blocks(result: WhyAdam) -> list[dict[str, Any]]:
    """Sizes of blocks at the start: geometric means over seeds."""
    found = []
    for name in result.configurations:
        one = result.curvature[name]
        for b, block in enumerate(one.blocks):
            sizes = {"ggn": one.ggn_sizes[:, b], "hessian": one.hessian_sizes[:, b]}
            with np.errstate(divide="ignore"):
                means = {key: float(np.exp(np.log(values).mean())) for key, values in sizes.items()}
            found.append({"configuration": name, "block": block} | means)
    return found


def _rates(result: WhyAdam) -> list[dict[str, Any]]:
    """Every rate that was tried."""
    found = []
    for name in result.configurations:
        for optimizer in OPTIMIZERS:
            run = result.runs[f"{name}/{optimizer}"]
            for r, rate in enumerate(run.rates):
                final = run.final[:, r]
                found.append(
                    {"configuration": name, "optimizer": optimizer, "lr": float(rate),
                     "loss": float(final.mean()), "diverged": int(np.isinf(final).sum()),
                     "chosen_by": int((run.chosen == r).sum())}
                )  # fmt: skip
    return found
