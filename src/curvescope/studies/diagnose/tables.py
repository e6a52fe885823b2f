"""The tables of a diagnosis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from curvescope.studies.diagnose.checks.seen import by_layer
from curvescope.studies.diagnose.checks.steps import block_threshold

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.diagnose.finding import Finding
    from curvescope.studies.diagnose.study import Diagnosis

COLUMNS = ("name", "severity", "value", "error", "limit", "unit", "where", "meaning", "advice", "evidence")
Row = dict[str, Any]


def of(found: Diagnosis) -> dict[str, pd.DataFrame]:
    """Those that the model has."""
    import pandas as pd

    rows = {
        "checks": [_check(check) for check in found.checks],
        "layers": layer_rows(found),
        "blocks": block_rows(found),
        "heads": [{k: v for k, v in row.items() if k not in ("layer", "number")} for row in head_rows(found)],
        "sequences": sequence_rows(found),
        "parts": [
            {"part": i, "lambda_max": top, "error": error}
            for i, (top, error) in enumerate(zip(found.parts.top, found.parts.error, strict=True))
        ],
    }
    findings = pd.DataFrame([finding_row(check) for check in found.findings], columns=list(COLUMNS))
    return {"findings": findings} | {name: pd.DataFrame(some) for name, some in rows.items() if some}


def finding_row(check: Finding) -> Row:
    """A finding as it is printed."""
    return {name: getattr(check, name) for name in COLUMNS}


def _check(check: Finding) -> Row:
    kept = ("name", "severity", "value", "error", "limit", "unit", "where")
    why = check.meaning if check.severity == "not looked at" else ""
    return {name: getattr(check, name) for name in kept} | {"why not": why}


def layer_rows(found: Diagnosis) -> list[Row]:
    """Norms of the Hessian's rows over a layer's matrices, and of the gradient without W_Q and W_K."""
    gradient, rows = found.parts.gradient, []
    for i, (layer, squares) in enumerate(by_layer(found.rows.names, found.rows.squares).items()):
        norm = float(np.sqrt(squares.mean()))
        stderr = float(squares.std(ddof=1) / np.sqrt(len(squares)))
        rows.append(
            {
                "layer": f"L{layer}",
                "rows_norm": norm,
                "rows_norm_stderr": stderr / (2 * norm) if norm else np.nan,
                "gradient_norm": float(np.sqrt(gradient[i])) if i < len(gradient) else np.nan,
            }
        )
    return rows


def block_rows(found: Diagnosis) -> list[Row]:
    """Matrices, the sharpest first."""
    if found.blocks is None:
        return []
    b, most = found.blocks, block_threshold(found.sharpness)
    return [
        {
            "block": b.names[i],
            "lambda_max": float(b.top[i]),
            "error": float(b.error[i]),
            "high": float(b.high[i]),
            "ceiling": most / float(b.top[i]) if b.top[i] > 0 else np.nan,
        }
        for i in np.argsort(-b.top)
    ]


def head_rows(found: Diagnosis) -> list[Row]:
    """Heads, layer by layer."""
    heads = found.heads
    shape = heads.liveness.shape[1:] if heads.liveness.size else heads.written.shape
    none = np.full(shape, np.nan)
    live, mass = (x.mean(0) if x.size else none for x in (heads.liveness, heads.mass))
    usual = float(np.median(heads.written)) if heads.written.size else 0.0
    written = heads.written / usual if usual > 0 else none
    change = heads.change if heads.change.size else none
    return [
        {
            "head": f"L{i}.h{j}",
            "layer": i,
            "number": j,
            "liveness": float(live[i, j]),
            "first_token": float(mass[i, j]),
            "written": float(written[i, j]),
            "loss_change": float(change[i, j]),
        }
        for i, j in np.ndindex(*shape)
    ]


def sequence_rows(found: Diagnosis) -> list[Row]:
    """Sequences that count."""
    s = found.samples
    return [
        {
            "sequence": number,
            "loss": float(s.losses[i]),
            "gradient_norm": float(s.gradient_norms[i]),
            "trace": float(s.traces[i]),
            "trace_stderr": float(s.traces_stderr[i]),
            "copy_of": str(s.copies[number]) if s.copies[number] != number else "",
        }
        for i, number in enumerate(s.numbers.astype(int).tolist())
    ]
