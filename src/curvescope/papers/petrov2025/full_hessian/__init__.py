"""The heat maps of the dense Hessian and the norms through training (experiments E1 to E3 of the paper).

All of it is the study `full_hessian`; here are its settings for the two profiles.
"""

from __future__ import annotations

from dataclasses import dataclass

from curvescope.core.config import setting
from curvescope.core.progress import Progress
from curvescope.data.tasks.pictures import PICTURES, check_pictures
from curvescope.papers.setting import FigureConfig
from curvescope.runs.study import Study
from curvescope.runs.work import State
from curvescope.studies import full_hessian
from curvescope.studies.full_hessian import FullHessian

__all__ = ["STUDY", "Config", "run"]

QUICK = {"seeds": 3, "batch_size": 64}


@dataclass(frozen=True)
class Config(FigureConfig):
    """Quick: 3 networks and batches of 64 pictures, about two minutes; full: 5 and the paper's 128."""

    seeds: int | None = setting(None, "networks that are trained; 3 in the profile quick, 5 in full")
    steps: int = setting(1000, "of training")
    pictures: str = setting(
        "digits", f"one of {', '.join(PICTURES)}, or a folder; the paper's are mnist, by the package datasets"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pictures(self.pictures)

    @property
    def study(self) -> full_hessian.Config:
        """The settings of the study."""
        own = {"data": self.pictures, "steps": self.steps, "device": self.device}
        own |= QUICK if self.profile == "quick" else {}
        own |= {} if self.seeds is None else {"seeds": self.seeds}
        return full_hessian.Config.from_dict(own)


def run(cfg: Config, *, progress: Progress | None = None, state: State | None = None) -> FullHessian:
    """The study with these settings."""
    return full_hessian.run(cfg.study, progress=progress, state=state)


STUDY = Study(Config, run)
