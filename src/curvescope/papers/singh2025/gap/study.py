"""How far the GGN is from the Hessian: two families of models of one size, and the bundled model.

The small models are exact in every number (`courses`). The bundled model is measured by the study `gap`, over
its checkpoints, by block and with other targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from curvescope.core.config import at_least, setting
from curvescope.core.progress import Progress
from curvescope.papers.claims import Claim
from curvescope.papers.setting import FigureConfig
from curvescope.papers.singh2025.gap import claims, words
from curvescope.papers.singh2025.gap.courses import FAMILIES, TASKS, Course, Place, measure_course
from curvescope.runs.shown import Line, Shown
from curvescope.runs.work import Piece, State, work_through
from curvescope.studies import gap
from curvescope.studies.gap.analysis import Pair

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SEEDS = {"quick": 4, "full": 10}
TOKENS = {"quick": 128, "full": 512}
STEPS = (0, 30, 100, 300)


@dataclass(frozen=True)
class Config(FigureConfig):
    """quick: 4 seeds, about four minutes; full: 10 seeds, and more text for the bundled model."""

    seeds: int = setting(0, "models of each kind; 0: those of the profile, 4 and 10")
    steps: tuple[int, ...] = setting(STEPS, "of training, after which a model is measured; the first is 0")
    tokens: int = setting(0, "of the text for the bundled model; 0: those of the profile, 128 and 512")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "seeds", "tokens")

    @property
    def count(self) -> int:
        """Seeds of each kind."""
        return self.seeds or SEEDS[self.profile]

    def of_study(self) -> gap.Config:
        """The settings for the bundled model."""
        return gap.Config(tokens=self.tokens or TOKENS[self.profile], device=self.device)


@dataclass(frozen=True)
class Gaps(Shown):
    """Small models of two families over training, and the bundled model."""

    seeds: int
    steps: list[int]
    courses: dict[str, Course]
    bundled: gap.Gap

    def pair(self, place: Place, step: int) -> Pair:
        """What was written out of a model after so many steps."""
        return self.courses[place.name].pair(step)

    def places(self, family: str, task: str) -> list[Place]:
        """All seeds of a family on a task."""
        return [Place(family, task, seed) for seed in range(self.seeds)]

    def summary(self) -> list[Line]:
        """The numbers to look at first."""
        return words.summary(self)

    def captions(self) -> dict[str, str]:
        """What each figure and table shows."""
        return words.captions(self)

    def tables(self) -> dict[str, pd.DataFrame]:
        """One row per small model and step, and the tables of the bundled model."""
        return words.tables(self)

    def figures(self) -> dict[str, Figure]:
        """Figures by name; drawing computes nothing."""
        from curvescope.papers.singh2025.gap import figures

        return figures.draw(self)

    def claims(self) -> list[Claim]:
        """What the slides say, and sentences of ours, next to what was measured."""
        return claims.of(self)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> Gaps:
    """Measure all models.

    Args:
        progress: called with (what, number, total) as each piece begins.
        state: finished pieces by name; filled as the figure goes, used when it goes on.
    """
    places = [Place(f, t, seed) for f in FAMILIES for t in TASKS for seed in range(cfg.count)]
    pieces = [Piece(place.name, partial(measure_course, place, cfg.steps)) for place in places]
    pieces.append(Piece("bundled", partial(gap.run, cfg.of_study()), "the bundled model"))
    found = work_through(pieces, progress=progress, state=state)
    return Gaps(
        seeds=cfg.count,
        steps=list(cfg.steps),
        courses={place.name: found.take(Course, place.name) for place in places},
        bundled=found.take(gap.Gap, "bundled"),
    )
