"""A function of two numbers: colors with lines of equal height."""

from __future__ import annotations

import numpy as np

from curvescope.viz.interactive import Scene
from curvescope.viz.scenes.maps import Colors, color_bar, scale_of
from curvescope.viz.scenes.parts import axis, nothing, numbers


def plane(
    a: np.ndarray,
    b: np.ndarray,
    values: np.ndarray,
    *,
    label: str,
    titles: tuple[str, str],
    colors: Colors = "linear",
    limits: tuple[float, float] | None = None,
) -> Scene:
    """Values (A, B) at a (A,) to the right and b (B,) upwards, with a cross at the origin."""
    scale = scale_of(values.ravel().tolist(), colors, limits)
    if scale is None:
        return nothing("no finite value", 220)
    bar = color_bar(scale, label)
    coloring = {"start": scale.low, "end": scale.high, "size": (scale.high - scale.low) / 14}
    data = [
        {
            "type": "contour", "x": numbers(a), "y": numbers(b), "z": [numbers(row) for row in values.T],
            "coloraxis": "coloraxis", "contours": coloring, "line": {"width": 0.7},
            "hovertemplate": f"a = %{{x:.3g}}, b = %{{y:.3g}}<br>{label}: %{{z:.5g}}<extra></extra>",
        },
        {
            "type": "scatter", "x": [0], "y": [0], "mode": "markers", "showlegend": False,
            "marker": {"symbol": "cross-thin-open", "size": 12, "color": "#000000", "line": {"width": 2}},
            "hovertemplate": "the model<extra></extra>",
        },
    ]  # fmt: skip
    layout = {
        "height": 480, "margin": {"l": 20, "r": 20, "t": 70, "b": 20}, "coloraxis": bar,
        "xaxis": axis(f"a: {titles[0]}"), "yaxis": axis(f"b: {titles[1]}"),
    }  # fmt: skip
    return {"data": data, "layout": layout}
