"""What the slides state about exact spectra: the study `exact_spectra`, and a verdict on every statement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from curvescope.core.progress import Progress
from curvescope.papers.setting import FigureConfig
from curvescope.papers.singh2025.exact_spectra.claims import verdicts
from curvescope.runs.shown import Claim, Line, Shown
from curvescope.runs.work import State
from curvescope.studies import exact_spectra

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PROFILES = {
    "quick": exact_spectra.Config(),
    "full": exact_spectra.Config(num_seeds=100, num_draws=400, num_rung_draws=100, bundled_tokens=512),
}
T = TypeVar("T")
NAME = "exact_spectra"
UNREAD = "the slides could not be read: their statements are compared, and none of their numbers"


@dataclass(frozen=True)
class Config(FigureConfig):
    """The profile sets the number of draws."""


@dataclass(frozen=True)
class ClaimedSpectra(Shown):
    """The study's result as a figure of the slides."""

    measured: exact_spectra.ExactSpectra

    def claims(self) -> list[Claim]:
        """Every claim with its verdict."""
        return verdicts(self.measured)

    def summary(self) -> list[Line]:
        """The claims, shorter: label, value, words."""
        return [(claim.claim, claim.verdict, claim.measured) for claim in self.claims()]

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return _named(self.measured.captions())

    def tables(self) -> dict[str, pd.DataFrame]:
        """Those of the study."""
        return _named(self.measured.tables())

    def figures(self) -> dict[str, Figure]:
        """Those of the study."""
        return _named(self.measured.figures())


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> ClaimedSpectra:
    """Compute everything, pieces of `state` excepted."""
    found = exact_spectra.run(PROFILES[cfg.profile], progress=progress, state=state)
    return ClaimedSpectra(found, notes=[*found.notes, UNREAD])


def _named(found: dict[str, T]) -> dict[str, T]:
    """With the figure's name before each of theirs: other figures of the paper lie in the same folder."""
    return {f"{NAME}_{name}": one for name, one in found.items()}
