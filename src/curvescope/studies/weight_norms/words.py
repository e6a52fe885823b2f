"""What is said about norms of weights: the numbers to look at first, tables, captions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from curvescope.core.numbers import plural
from curvescope.runs.shown import Line
from curvescope.studies.weight_norms.random_models import ROLES

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.weight_norms.study import WeightNorms

WHERE = {
    "blocks": "blocks at checkpoints, pooled",
    "within": "each block over its checkpoints, mean over blocks",
    "pre": "random models with norms",
    "none": "random models without norms",
}


def summary(result: WeightNorms) -> list[Line]:
    """Correlations over training, and the roles that λ_max follows over random models."""
    found: list[Line] = []
    for where in ("within", "blocks"):
        one = result.correlation(where, "all", "spectral")
        words = f"Spearman's ρ of λ_max with ‖W‖₂, {WHERE[where]}; 95 % interval"
        known = "not known" if math.isnan(one.value) else one.words
        words += "" if not math.isnan(one.value) else "; no block has checkpoints enough for it"
        found.append((f"over training, {where}", known, words))
    for norm, models in result.random.items():
        each = {role: result.correlation(norm, role, "spectral") for role in ROLES}
        order = sorted(each, key=lambda role: -each[role].value)
        words = f"of {plural(len(models.lambda_max), 'model')}: " + ", ".join(
            f"{role} {each[role].words}" for role in order
        )
        found.append((f"{WHERE[norm]}", f"{order[0]} first", words))
    found += [(claim.verdict, "", f"{claim.claim}: {claim.measured}") for claim in result.claims()]
    return [*found, *(("note", "", note) for note in result.notes)]


def tables(result: WeightNorms) -> dict[str, pd.DataFrame]:
    """One row per correlation; one per block and checkpoint; one per random model."""
    import pandas as pd

    norms = [_row(key, result) for key in result.correlations]
    training = [
        {
            "checkpoint": name, "loss": t.loss, "block": block, "lambda_max": t.lambda_max[i],
            "lambda_max_error": t.error[i], "spectral_norm": t.spectral[i], "frobenius_norm": t.frobenius[i],
        }
        for name, t in result.trained.items()
        for i, block in enumerate(result.blocks)
    ]  # fmt: skip
    found = {"norms": pd.DataFrame(norms), "training": pd.DataFrame(training)}
    random = [
        {"norms": norm, "loss": m.loss[i], "lambda_max": m.lambda_max[i], "lambda_max_error": m.error[i]}
        | {f"spectral_{role}": m.spectral[i, j] for j, role in enumerate(ROLES)}
        | {f"frobenius_{role}": m.frobenius[i, j] for j, role in enumerate(ROLES)}
        for norm, m in result.random.items()
        for i in range(len(m.lambda_max))
    ]
    return found | ({"random": pd.DataFrame(random)} if random else {})


def _row(key: str, result: WeightNorms) -> dict[str, Any]:
    where, role, kind = key.split(".")
    one = result.correlations[key]
    return {
        "over": WHERE[where], "role": role, "norm": kind, "spearman": one.value, "spearman_low": one.low,
        "spearman_high": one.high, "rows": one.count, "drawn": one.groups,
    }  # fmt: skip


def captions(result: WeightNorms) -> dict[str, str]:
    """What each figure and table shows."""
    found = {
        "norms": "Spearman's ρ of λ_max with norms of weight matrices, and its 95 % interval by the "
        "bootstrap over what is independent (drawn): blocks, each with all its checkpoints, or models; "
        "difference: ρ with the spectral norm less that with the Frobenius norm. "
        "Over training: λ_max of the block's own part of the Hessian. Over random models: λ_max of the "
        "whole Hessian.",
        "training": "λ_max of each weight matrix's block of the Hessian, within the error an eigenvalue, "
        "beside the spectral and the Frobenius norm of the matrix.",
        "over_training": f"λ_max of blocks against ‖W‖₂ at {plural(len(result.trained), 'checkpoint')}, a "
        "line for each block: left all, right the rank correlations by role.",
    }
    if result.random:
        found["random"] = (
            "Random Transformers of one layer: each weight matrix has random singular vectors, a Frobenius "
            "norm log-uniform over a factor of 16 and singular values that fall as i^(−a), a uniform up to "
            "2, all drawn independently."
        )
        found["random_models"] = found["random"] + " λ_max of the whole Hessian against ‖W‖₂, role by role."
    return found
