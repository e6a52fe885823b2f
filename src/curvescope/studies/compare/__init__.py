"""Comparison of models, checkpoints or data sets: differences of their curvature, with intervals."""

from curvescope.runs.study import Study
from curvescope.studies.compare.study import PLAN, Comparison, Config, run

__all__ = ["STUDY", "Comparison", "Config", "run"]

STUDY = Study(Config, run, PLAN, on_pieces=True)
