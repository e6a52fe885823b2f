"""A training run as the monitor sees it: edge of stability, warm-up, spikes, grokking; checkpoints too."""

from curvescope.runs.study import Study
from curvescope.studies.dynamics.course import Course, Recipe, follow
from curvescope.studies.dynamics.sequence import Sequence
from curvescope.studies.dynamics.settings import EXPERIMENTS, Config
from curvescope.studies.dynamics.study import Dynamics, run

__all__ = ["EXPERIMENTS", "STUDY", "Config", "Course", "Dynamics", "Recipe", "Sequence", "follow", "run"]

STUDY = Study(Config, run)
