"""The figures of the study `activations`: from its arrays, nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from curvescope.viz import activations as viz

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.studies.activations.measure import TokenCurvature
    from curvescope.studies.activations.study import Activations

TEXTS = 3  # points at which the text is shown


def draw(result: Activations) -> dict[str, Figure]:
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
