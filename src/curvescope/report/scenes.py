"""Figures to turn with the mouse: plotly's JSON from a result, and the library that draws it."""

from __future__ import annotations

from collections.abc import Sequence

from curvescope.report.headings import heading
from curvescope.runs.shown import Shown

Section = dict[str, object]
"""What the template of the page reads, by name."""


def scenes(result: Shown, captions: dict[str, str]) -> list[Section]:
    """The scenes of a result that has any: name, plotly's JSON, caption."""
    return [
        {"name": heading(name), "figure": figure, "caption": captions.get(name, "")}
        for name, figure in result.scenes().items()
    ]


def library(sections: Sequence[Section]) -> str:
    """plotly.js if a section has a scene and plotly is installed, else nothing; the page holds it (5 MB)."""
    if not any(section.get("scenes") for section in sections):
        return ""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return get_plotlyjs()
