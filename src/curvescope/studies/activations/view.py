"""Tables, figures and captions of the study `activations`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.core.hessian_terms import TITLES
from curvescope.runs.study_result import Tables
from curvescope.viz import activations as viz
from curvescope.viz import style
from curvescope.viz.writers import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.studies.activations.study import Activations, TokenCurvature


def tables(result: Activations) -> Tables:
    """Return one table of tokens at every point, and one of points."""
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
    return {"points": points, "tokens": tokens}


TEXTS = 3  # points at which the text is shown


def figures(result: Activations) -> dict[str, Figure]:
    """Draw curvature by depth, by position, and over the text if it has tokens."""
    found = {"depth": _depth(result), "positions": _positions(result)}
    return found | ({"text": _text(result)} if any(result.texts) else {})


def _depth(result: Activations) -> Figure:
    figure, axes = style.subplots(1, 3, figsize=(13, 3.6))
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
    num = int(max(p.position.max() for p in result.points)) + 1
    values = np.full((len(result.points), num), np.nan)
    for row, p in zip(values, result.points, strict=True):
        for t in range(num):
            here = p.relative[(p.position == t) & (p.relative > 0)]
            row[t] = np.log10(here).mean() if len(here) else np.nan
    size = (max(6.0, 2.2 + 0.24 * min(num, 60)), 1.3 + 0.3 * len(values))
    figure, ax = style.subplots(figsize=size)
    viz.position_map(ax, values, [p.at for p in result.points], label="log₁₀ λ max |x|²")
    return figure


def _text(result: Activations) -> Figure:
    chosen = _spread(result.points)
    first = chosen[0].sequence == chosen[0].sequence.min()
    tokens = [text for text, own in zip(result.texts, first, strict=True) if own]
    lines = viz.wrapped(tokens)
    size = (10, len(chosen) * (0.55 + 0.27 * len(lines)))
    figure, axes = style.subplots(len(chosen), 1, figsize=size, squeeze=False)
    for ax, p in zip(axes[:, 0], chosen, strict=True):
        viz.colored_text(ax, tokens, p.relative[first], title=p.at, label="λ max |x|²")
    return figure


def _spread(points: list[TokenCurvature]) -> list[TokenCurvature]:
    """Return the first, the middle and the last point, or fewer."""
    places = np.linspace(0, len(points) - 1, min(TEXTS, len(points))).round().astype(int)
    return [points[i] for i in dict.fromkeys(places.tolist())]


def captions(result: Activations) -> dict[str, str]:
    """Return a caption for each figure and table."""
    exact = all(p.exact for p in result.points)
    how = (
        "Every block was computed in full."
        if exact
        else "By Lanczos; traces are estimated, ± is a standard error."
    )
    what = (
        f"the {TITLES[result.matrix]} of the summed loss of a token's sequence in the state x of that token "
        "alone, in nats per squared unit of x"
    )
    return {
        "depth": f"Along the depth: λ_max of {what} (left), the same times |x|², so steps are measured "
        "in units of |x| (middle), and the trace (right). Lines are medians over tokens, bands are the "
        "interquartile range.",
        "positions": "Mean over sequences of log₁₀ λ_max |x|², by position and point. In a causal "
        "model, all later tokens read the early ones, and no token reads the last. Gray: zero or "
        "negative.",
        "text": "The first sequence, each token colored by its λ_max |x|² at three points: how "
        "sensitive the loss of this text is to the activation of a single token. Gray: zero or negative.",
        "tokens": f"One row for each token and point: smallest and largest eigenvalue and trace of {what}. "
        f"{how} towards and away: the tokens whose logits the sharpest direction raises on the direct path, "
        "on the side where the loss falls and on the other side.",
        "points": "Medians over tokens at each point, and the share of tokens whose trace is negative.",
    }
