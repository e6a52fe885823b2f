"""Curvature during training: edge of stability, warm-up, spikes, grokking, and checkpoints."""

from curvescope.runs.study import Study
from curvescope.studies.dynamics.analysis import Course, Recipe, Sequence, follow
from curvescope.studies.dynamics.study import EXPERIMENTS, Config, Dynamics, run

__all__ = ["EXPERIMENTS", "STUDY", "Config", "Course", "Dynamics", "Recipe", "Sequence", "follow", "run"]

STUDY = Study(Config, run)
