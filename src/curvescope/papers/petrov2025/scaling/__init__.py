"""Curvature against model size and data size: what the article draws as 1/√D, measured on a trained grid.

The article's `ScalingLawAnalyzer` takes the outer product of the gradient for the Hessian and trains nothing;
its figure draws 1/√D through the first point. Here the grid is trained, second derivatives are measured
(`studies.scaling`), and every exponent has an interval and a verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.config import at_least, setting
from curvescope.core.progress import Progress
from curvescope.papers.setting import FigureConfig
from curvescope.runs.study import Study
from curvescope.runs.work import State
from curvescope.studies import scaling

__all__ = ["STUDY", "Config", "run"]

SEEDS = {"quick": 2, "full": 5}


@dataclass(frozen=True)
class Config(FigureConfig):
    """quick: the small grid with two seeds; full: five seeds, and on a card the large grid."""

    seeds: int = setting(0, "models of each cell; 0: those of the profile, 2 and 5")
    seed: int = setting(0, "of the data and of everything random")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "seeds")

    def of_study(self) -> scaling.Config:
        """The settings of the study."""
        large = self.profile == "full" and self.device != "cpu"
        return scaling.Config(
            grid="large" if large else "small",
            seeds=self.seeds or SEEDS[self.profile],
            device=self.device,
            seed=self.seed,
        )


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> scaling.Scaling:
    """The study with the settings of the profile."""
    return scaling.run(cfg.of_study(), progress=progress, state=state)


STUDY = Study(Config, run)
