"""The tables of the study `full_hessian`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.full_hessian.study import FullHessian, Network


def of(result: FullHessian) -> dict[str, pd.DataFrame]:
    """Every table by name."""
    import pandas as pd

    found = {"pairs": _pairs, "norms": _norms, "networks": _network, "accuracy": _accuracy}
    rows = {name: [row for n in result.networks for row in make(n)] for name, make in found.items()}
    tables = {f"hessian_{name}": pd.DataFrame(entries) for name, entries in rows.items()}
    return tables | {"hessian_claims": pd.DataFrame([claim._asdict() for claim in result.claims()])}


def _pairs(network: Network) -> list[dict[str, Any]]:
    """One row per pair of blocks, upper triangle with the diagonal, in both Hessians."""
    return [
        {
            "seed": network.training.seed,
            "stage": stage,
            "row": one,
            "column": two,
            "rows": found.sizes[i],
            "columns": found.sizes[j],
            "frobenius": float(found.frobenius[i, j]),
            "rms": float(found.rms[i, j]),
            "brightness": float(found.brightness[i, j]),
            "max_abs": float(found.max_abs[i, j]),
        }
        for stage, found in network.stages.items()
        for i, one in enumerate(found.names)
        for j, two in enumerate(found.names)
        if i <= j
    ]


def _norms(network: Network) -> list[dict[str, Any]]:
    """One row per step and group of blocks."""
    found = network.norms
    return [
        {
            "seed": network.training.seed,
            "step": int(step),
            "group": group,
            "parameters": int(found.sizes[g]),
            "weights": float(found.weights[s, g]),
            "hessian": float(found.hessian[s, g]),
            "hessian_low": float(found.low[s, g]),
            "hessian_high": float(found.high[s, g]),
            "rms": float(found.hessian[s, g] / found.sizes[g]),
            "method": "exact" if found.exact[g] else "probes",
        }
        for s, step in enumerate(found.steps)
        for g, group in enumerate(found.groups)
    ]


def _network(network: Network) -> list[dict[str, Any]]:
    """One row per Hessian."""
    training = network.training
    steps = {"initial": 0, "trained": training.trained_step}
    accuracy = {"initial": float(training.accuracy[0]), "trained": training.trained_accuracy}
    return [
        {
            "seed": training.seed,
            "stage": stage,
            "step": steps[stage],
            "accuracy": accuracy[stage],
            "loss": found.loss,
            "frobenius": found.norm,
            "rms": found.norm / sum(found.sizes),
            "max_abs": float(found.max_abs.max()),
            "stripe_ratio": found.stripe_ratio,
            "stripe_share": found.stripe_share,
        }
        for stage, found in network.stages.items()
    ]


def _accuracy(network: Network) -> list[dict[str, Any]]:
    """One row per evaluation during training."""
    training = network.training
    return [
        {"seed": training.seed, "step": int(step), "accuracy": float(accuracy)}
        for step, accuracy in zip(training.evaluated, training.accuracy, strict=True)
    ]
