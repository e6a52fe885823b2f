"""What the paper and its precursor state about bounds: the study `bounds`, and a verdict on every claim.

The paper measures none of its bounds, so what is published are the inequalities themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.progress import Progress
from curvescope.papers.claimed import Claimed
from curvescope.papers.petrov2025.bounds.claims import verdicts
from curvescope.papers.setting import FigureConfig
from curvescope.runs.shown import Claim
from curvescope.runs.work import State
from curvescope.studies import bounds

PROFILES = {
    "quick": bounds.Config(num_seeds=4),
    "full": bounds.Config(
        num_seeds=20,
        weight_scales=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        data_scales=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        depths=(1, 2, 4, 8),
        num_layers=(1, 2, 3, 4, 6),
    ),
}
EVIDENCE = "a claim that holds is violated by no instance that was tried, which is evidence and no proof"


@dataclass(frozen=True)
class Config(FigureConfig):
    """The profile sets the number of instances and scales."""


@dataclass(frozen=True)
class ClaimedBounds(Claimed):
    """The study's comparisons as a figure of the paper."""

    NAME = "bounds"

    measured: bounds.Bounds

    def claims(self) -> list[Claim]:
        """Every claim with its verdict."""
        return verdicts(self.measured)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> ClaimedBounds:
    """Measure everything, pieces of `state` excepted."""
    found = bounds.run(PROFILES[cfg.profile], progress=progress, state=state)
    return ClaimedBounds(found, notes=[*found.notes, EVIDENCE])
