"""A training run as the monitor sees it: edge of stability, warm-up, spikes, grokking; checkpoints too."""

from curvescope.runs.study import Study
from curvescope.studies.dynamics.analysis import Course, Recipe, Sequence, follow
from curvescope.studies.dynamics.study import EXPERIMENTS, Config, Dynamics, run

__all__ = ["EXPERIMENTS", "STUDY", "Config", "Course", "Dynamics", "Recipe", "Sequence", "follow", "run"]

STUDY = Study(Config, run)
