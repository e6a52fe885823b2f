"""The tables of the study `gap`: what is known of H and H_o, one row each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from curvescope.studies.gap.pair import Pair

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.gap.study import Gap

SHORT = {"hessian": "H", "ggn": "H_o", "functional": "H_f"}
OVER_TRAINING = (
    "checkpoint", "loss", "functional_share", "functional_share_error", "lambda_max_gap",
    "lambda_max_gap_error", "trace_gap", "trace_gap_error", "wasserstein", "wasserstein_error",
)  # fmt: skip


def of(result: Gap) -> dict[str, pd.DataFrame]:
    """`gap` by checkpoint and block, `training` by checkpoint, `targets` by what the targets are."""
    import pandas as pd

    rows = [
        {"checkpoint": name, **row(result.pair(name, block))}
        for name in result.checkpoints
        for block in result.blocks
    ]
    gap = pd.DataFrame(rows)
    found = {"gap": gap, "training": gap[gap["block"] == result.blocks[0]][list(OVER_TRAINING)]}
    if result.targets:
        last = {"the data's own": result.pair(result.checkpoints[-1]), **result.targets}
        found["targets"] = pd.DataFrame([{"targets": name, **row(pair)} for name, pair in last.items()])
    return found


def row(pair: Pair) -> dict[str, Any]:
    """Everything that is known about one block."""
    found: dict[str, Any] = {"block": pair.block, "parameters": pair.size, "loss": pair.loss}
    for part in ("hessian", "ggn"):
        value, error = pair.top(part)
        ends = getattr(pair, part).ends
        key = f"lambda_max_{SHORT[part]}"
        found |= {key: value, f"{key}_error": error, f"{key}_high": ends.high}
    found |= dict(zip(("lambda_max_gap", "lambda_max_gap_error"), pair.gap(), strict=True))
    found |= dict(zip(("lambda_max_gap_low", "lambda_max_gap_high"), pair.gap_interval(), strict=True))
    for part, letter in SHORT.items():
        found |= _estimates(pair, part, letter)
    found |= dict(zip(("trace_gap", "trace_gap_error"), pair.trace_gap(), strict=True))
    found |= dict(zip(("functional_share", "functional_share_error"), pair.share(), strict=True))
    found |= dict(zip(("wasserstein", "wasserstein_error"), pair.wasserstein(), strict=True))
    if pair.distance is not None and pair.scale > 0:
        ends = {"low": pair.distance.low, "high": pair.distance.high}
        ends |= {name: getattr(pair.distance, name) for name in ("stderr", "least", "most", "unresolved")}
        found |= {f"wasserstein_{name}": value / pair.scale for name, value in ends.items()}
    return found | {"rms_eigenvalue_H": pair.scale, "method": "exact" if pair.hessian.exact else "probes"}


def _estimates(pair: Pair, part: str, letter: str) -> dict[str, float]:
    """Trace and Frobenius norm of one of the three, with standard errors and 95 % intervals."""
    own = getattr(pair, part)
    return {
        f"trace_{letter}": own.trace,
        f"trace_{letter}_stderr": own.trace_stderr,
        f"trace_{letter}_low": own.trace_low,
        f"trace_{letter}_high": own.trace_high,
        f"frobenius_{letter}": own.norm,
        f"frobenius_{letter}_stderr": own.norm_stderr,
        f"frobenius_{letter}_low": own.norm_low,
        f"frobenius_{letter}_high": own.norm_high,
    }
