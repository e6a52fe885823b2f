"""The figures of what a monitor has seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvescope.monitor.result import Monitored


def draw(result: Monitored) -> dict[str, Figure]:
    """All of them."""
    return {}
