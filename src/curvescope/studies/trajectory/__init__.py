"""The paths of tokens through a model: does a token travel to the next one, and how?"""

from curvescope.runs.study import Study
from curvescope.studies.trajectory.study import Config, Trajectory, run

__all__ = ["STUDY", "Config", "Trajectory", "run"]

STUDY = Study(Config, run)
