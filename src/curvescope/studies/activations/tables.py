"""The tables of the study `activations`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz.writers import visible

if TYPE_CHECKING:
    import pandas as pd

    from curvescope.studies.activations.study import Activations


def make(result: Activations) -> dict[str, pd.DataFrame]:
    """Every token at every point, and the points."""
    import pandas as pd

    tokens = [
        pd.DataFrame(
            {
                "sequence": p.sequence,
                "position": p.position,
                "token": [visible(text) for text in result.texts],
                "point": p.at,
                "lambda_max": p.lambda_max,
                "residual": p.residual,
                "lambda_min": p.lambda_min,
                "trace": p.trace,
                "± trace": p.trace_stderr,
                "slope": p.slope,
                "|x|": p.size,
                "lambda_max |x|²": p.relative,
                "towards": p.towards,
                "away": p.away,
            }
        )
        for p in result.points
    ]
    points = [
        {
            "point": p.at,
            "width": p.width,
            "lambda_max": np.median(p.lambda_max),
            "lambda_min": np.median(p.lambda_min),
            "trace": np.median(p.trace),
            "slope": np.median(p.slope),
            "|x|": np.median(p.size),
            "lambda_max |x|²": np.median(p.relative),
            "share of negative traces": np.mean(p.trace < 0),
            "largest residual / lambda_max": np.max(p.residual / np.maximum(np.abs(p.lambda_max), 1e-300)),
        }
        for p in result.points
    ]
    return {"points": pd.DataFrame(points), "tokens": pd.concat(tokens, ignore_index=True)}
