"""Tables, figures and captions of the study `activations`, made from the arrays of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.parts import TITLES
from curvescope.viz import activations as viz
from curvescope.viz.writers import visible

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from curvescope.studies.activations.analysis import TokenCurvature
    from curvescope.studies.activations.study import Activations


def tables(result: Activations) -> dict[str, pd.DataFrame]:
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


# ---------------------------------------------------------------------------------------------------- figures

TEXTS = 3  # points at which the text is shown


def figures(result: Activations) -> dict[str, Figure]:
    """Along the depth, by position, and the text itself where it has tokens."""
    found = {"depth": _depth(result), "positions": _positions(result)}
    return found | ({"text": _text(result)} if any(result.texts) else {})


def _depth(result: Activations) -> Figure:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    names = [p.at for p in result.points]
    panels = {
        "λ max": [p.lambda_max for p in result.points],
        "λ max |x|²": [p.relative for p in result.points],
        "trace": [p.trace for p in result.points],
    }
    for ax, (title, values) in zip(axes, panels.items(), strict=True):
        viz.quartiles(ax, names, values, title=title)
    return figure


def _positions(result: Activations) -> Figure:
    import matplotlib.pyplot as plt

    num = int(max(p.position.max() for p in result.points)) + 1
    values = np.full((len(result.points), num), np.nan)
    for row, p in zip(values, result.points, strict=True):
        for t in range(num):
            here = p.relative[(p.position == t) & (p.relative > 0)]
            row[t] = np.log10(here).mean() if len(here) else np.nan
    size = (max(6.0, 2.2 + 0.24 * min(num, 60)), 1.3 + 0.3 * len(values))
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    viz.position_map(ax, values, [p.at for p in result.points], label="log₁₀ λ max |x|²")
    return figure


def _text(result: Activations) -> Figure:
    import matplotlib.pyplot as plt

    chosen = _spread(result.points)
    first = chosen[0].sequence == chosen[0].sequence.min()
    tokens = [text for text, own in zip(result.texts, first, strict=True) if own]
    lines = viz.wrapped(tokens)
    size = (10, len(chosen) * (0.55 + 0.27 * len(lines)))
    figure, axes = plt.subplots(len(chosen), 1, figsize=size, layout="constrained", squeeze=False)
    for ax, p in zip(axes[:, 0], chosen, strict=True):
        viz.colored_text(ax, tokens, p.relative[first], title=p.at, label="λ max |x|²")
    return figure


def _spread(points: list[TokenCurvature]) -> list[TokenCurvature]:
    """The first, a middle one and the last, or fewer."""
    places = np.linspace(0, len(points) - 1, min(TEXTS, len(points))).round().astype(int)
    return [points[i] for i in dict.fromkeys(places.tolist())]


# --------------------------------------------------------------------------------------------------- captions


def captions(result: Activations) -> dict[str, str]:
    """What each figure and table shows."""
    exact = all(p.exact for p in result.points)
    how = "Blocks were written out." if exact else "By Lanczos; traces are estimated, ± is a standard error."
    what = (
        f"the {TITLES[result.matrix]} of the summed loss of a token's sequence in the state x of that token "
        "alone, in nats per squared unit of x"
    )
    return {
        "depth": f"Along the depth: λ_max of {what} (left), the same times |x|², so that steps are measured "
        "in units of x (middle), and the trace (right). Lines are medians over tokens, bands hold the middle "
        "half.",
        "positions": "Mean over sequences of log₁₀ λ_max |x|², by position and point. A causal model's early "
        "tokens are read by all later ones, its last ones by nobody else. Gray: not above zero.",
        "text": "The first sequence, each token colored by its λ_max |x|² at three points: where the loss "
        "of this text hangs on the state of a single token. Gray: not above zero.",
        "tokens": f"One row for each token and point: ends of the spectrum and trace of {what}. {how} "
        "towards and away: the tokens whose logits the sharpest direction raises on the direct path, on the "
        "side where the loss falls, and on the other.",
        "points": "Medians over tokens at each point, and the share of tokens whose trace is negative.",
    }
