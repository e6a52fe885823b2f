"""What the slides state about exact spectra: the study `exact_spectra`, and a verdict on every statement."""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.progress import Progress
from curvescope.papers.claimed import Claimed
from curvescope.papers.setting import FigureConfig
from curvescope.papers.singh2025.exact_spectra.claims import verdicts
from curvescope.runs.shown import Claim
from curvescope.runs.work import State
from curvescope.studies import exact_spectra

PROFILES = {
    "quick": exact_spectra.Config(),
    "full": exact_spectra.Config(num_seeds=100, num_draws=400, num_rung_draws=100, bundled_tokens=512),
}
STATED = "statements of the slides are compared, and none of their numbers"


@dataclass(frozen=True)
class Config(FigureConfig):
    """The profile sets the number of draws."""


@dataclass(frozen=True)
class ClaimedSpectra(Claimed):
    """The study's result as a figure of the slides."""

    NAME = "exact_spectra"

    measured: exact_spectra.ExactSpectra

    def claims(self) -> list[Claim]:
        """Every claim with its verdict."""
        return verdicts(self.measured)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> ClaimedSpectra:
    """Compute everything, pieces of `state` excepted."""
    found = exact_spectra.run(PROFILES[cfg.profile], progress=progress, state=state)
    return ClaimedSpectra(found, notes=[*found.notes, STATED])
