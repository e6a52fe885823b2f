"""The tables of a diagnosis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.studies.diagnose.checks.seen import by_layer

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.diagnose.finding import Finding
    from curvescope.studies.diagnose.study import Diagnosis


def of(found: Diagnosis) -> dict[str, pd.DataFrame]:
    """Those that the model has."""
    import pandas as pd

    tables = {
        "findings": pd.DataFrame([row(check) for check in found.findings], columns=list(COLUMNS)),
        "checks": pd.DataFrame([_check(check) for check in found.checks]),
        "layers": _layers(found),
        "blocks": _blocks(found),
        "heads": _heads(found),
        "sequences": _sequences(found),
        "parts": pd.DataFrame({"lambda_max": found.parts.top, "error": found.parts.error}),
    }
    return {name: table for name, table in tables.items() if name == "findings" or len(table)}


COLUMNS = ("name", "severity", "value", "error", "limit", "unit", "where", "meaning", "advice", "evidence")


def row(check: Finding) -> dict[str, object]:
    """A finding as it is printed."""
    return {name: getattr(check, name) for name in COLUMNS}


def _check(check: Finding) -> dict[str, object]:
    why = check.meaning if check.severity == "not looked at" else ""
    kept = ("name", "severity", "value", "error", "limit", "unit", "where")
    return {name: getattr(check, name) for name in kept} | {"why not": why}


def _layers(found: Diagnosis) -> pd.DataFrame:
    import pandas as pd

    rows, gradient = by_layer(found.rows.names, found.rows.squares), found.parts.gradient
    return pd.DataFrame(
        [
            {
                "layer": f"L{layer}",
                "rows_norm": float(np.sqrt(squares.mean())),
                "gradient_norm": float(np.sqrt(gradient[i])) if i < len(gradient) else np.nan,
            }
            for i, (layer, squares) in enumerate(rows.items())
        ]
    )


def _blocks(found: Diagnosis) -> pd.DataFrame:
    import pandas as pd

    if found.blocks is None:
        return pd.DataFrame()
    b = found.blocks
    with np.errstate(divide="ignore"):
        ceiling = np.where(b.top > 0, 2 / b.top, np.nan)
    frame = pd.DataFrame(
        {"block": b.names, "lambda_max": b.top, "error": b.error, "high": b.high, "ceiling": ceiling}
    )
    return frame.sort_values("lambda_max", ascending=False, ignore_index=True)


def _heads(found: Diagnosis) -> pd.DataFrame:
    import pandas as pd

    heads = found.heads
    shape = heads.liveness.shape[1:] if heads.liveness.size else heads.written.shape
    none = np.full(shape, np.nan)
    live, mass = (x.mean(0) if x.size else none for x in (heads.liveness, heads.mass))
    written = heads.written / max(float(np.median(heads.written)), 1e-300) if heads.written.size else none
    change = heads.change if heads.change.size else none
    return pd.DataFrame(
        [
            {
                "head": f"L{i}.h{j}",
                "liveness": live[i, j],
                "first_token": mass[i, j],
                "written": written[i, j],
                "loss_change": change[i, j],
            }
            for i, j in np.ndindex(*shape)
        ]
    )


def _sequences(found: Diagnosis) -> pd.DataFrame:
    import pandas as pd

    s = found.samples
    copies = [int(s.copies[i]) if s.copies[i] != i else "" for i in s.numbers.astype(int)]
    return pd.DataFrame(
        {
            "sequence": s.numbers.astype(int),
            "loss": s.losses,
            "gradient_norm": s.gradient_norms,
            "trace": s.traces,
            "trace_stderr": s.traces_stderr,
            "copy_of": copies,
        }
    )
