"""The words of what a monitor has seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curvescope.runs.shown import Line

if TYPE_CHECKING:
    from curvescope.monitor.result import Monitored


def summary(result: Monitored) -> list[Line]:
    """The numbers to look at first."""
    h = result.history
    if not len(h["step"]):
        return [("measurements", "0", "nothing was measured")]
    return [("measurements", f"{len(h['step'])}", f"steps {h['step'][0]:.0f} to {h['step'][-1]:.0f}")]


def captions(result: Monitored) -> dict[str, str]:
    """What each figure and table shows."""
    return {"history": "One row a measurement.", "blocks": "One row a block and measurement."}
