"""The paths: does the state of a token travel to the next one (figure 4), in the space itself?"""

from __future__ import annotations

from dataclasses import dataclass, replace

from curvescope.core.config import setting
from curvescope.core.numbers import with_error
from curvescope.core.progress import Progress
from curvescope.papers.claims import AGREES, DIFFERS
from curvescope.papers.molina2023.setting import AUTO, MODEL, Reproduced, measured_on, with_model
from curvescope.papers.setting import Profile
from curvescope.runs.study import Study
from curvescope.runs.work import State
from curvescope.studies import trajectory

FULL_TOKENS = 16384
SURE = 3.0  # standard errors


@dataclass(frozen=True)
class Config(trajectory.Config):
    """As the study; `auto` is the best model at hand, `full` takes more tokens."""

    model: str = setting(AUTO, MODEL)
    profile: Profile = setting("quick", "full takes at least 16,384 tokens")


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Reproduced:
    """The study, and whether tokens come nearer to the next one, in the picture and over many."""
    own, why = with_model(cfg)
    if cfg.profile == "full":
        own = replace(own, tokens=max(own.tokens, FULL_TOKENS))
    found = trajectory.run(own, progress=progress, state=state)
    claims = []
    if "angle_target" in found.path.values:
        angles = found.path.values["angle_target"][found.token]
        claims.append(
            [
                "the second-to-last token approaches the last (figure 4)",
                "stated (reviews)",
                f"angle in {found.path.states.shape[-1]} dimensions: {angles[0]:.1f}° to {angles[-1]:.1f}°",
                measured_on(own.model, AGREES if angles[-1] < angles[0] else DIFFERS),
            ]
        )
    if "angle_target" in found.means.curves:
        c = found.means.curves["angle_target"]
        nearer = c.change + SURE * c.change_stderr < 0
        claims.append(
            [
                f"all tokens come nearer to {found.means.target}, more than to shuffled ones",
                "asked by reviewers",
                f"angle changes by {with_error(c.change, c.change_stderr)}° beyond shuffled targets",
                measured_on(own.model, AGREES if nearer else DIFFERS),
            ]
        )
    return Reproduced("trajectory", found.model, why, found, claims)


STUDY = Study(Config, run)
