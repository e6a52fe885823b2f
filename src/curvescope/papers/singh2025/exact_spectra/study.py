"""What the slides state about exact spectra: the study `exact_spectra`, and a verdict on every statement."""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.config import setting
from curvescope.core.progress import Progress
from curvescope.papers.claimed import Claimed
from curvescope.papers.setting import FigureConfig
from curvescope.papers.singh2025.exact_spectra.claims import verdicts
from curvescope.runs.shown import Claim
from curvescope.runs.work import State
from curvescope.studies import exact_spectra

PROFILES: dict[str, dict[str, int]] = {
    "quick": {},
    "full": {"num_seeds": 100, "num_draws": 400, "num_rung_draws": 100, "bundled_tokens": 512},
}
STATED = "statements of the slides are compared, and none of their numbers"


@dataclass(frozen=True)
class Config(FigureConfig):
    """The profile sets the number of draws; what is set besides is as in the study."""

    head_size: int | None = setting(None, "d_K of attention, and neurons of the two-layer networks; 8")
    num_seeds: int | None = setting(None, "draws at every value that is varied; 8, in full 100")
    num_draws: int | None = setting(None, "draws where λ_max of H and the GGN are compared; 40, in full 400")
    num_rung_draws: int | None = setting(None, "draws on every rung of the pairing; 16, in full 100")
    bundled_tokens: int | None = setting(None, "of the bundled model's rungs, 0: without; 64, in full 512")
    seed: int = setting(0, "of the first draw; the others follow")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.of_study()  # raises what the study does

    def of_study(self) -> exact_spectra.Config:
        """The settings of the study: those of the profile, where no others are given."""
        own = {name: value for name, value in self.to_dict().items() if value is not None}
        given = {name: own[name] for name in exact_spectra.Config().to_dict() if name in own}
        return exact_spectra.Config.from_dict({**PROFILES[self.profile], **given})


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
    found = exact_spectra.run(cfg.of_study(), progress=progress, state=state)
    return ClaimedSpectra(found, notes=[*found.notes, STATED])
