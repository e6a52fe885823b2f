"""Study of token paths through a model: distance to the next token and other targets, layer by layer."""

from curvescope.runs.study import Study
from curvescope.studies.trajectory.study import Config, Trajectory, run

__all__ = ["STUDY", "Config", "Trajectory", "run"]

STUDY = Study(Config, run)
