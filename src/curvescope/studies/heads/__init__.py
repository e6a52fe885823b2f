"""Heads of a model as matrices: tokens that queries match and values write, and composition."""

from curvescope.runs.study import Study
from curvescope.studies.heads.study import Config, Heads, run

__all__ = ["STUDY", "Config", "Heads", "run"]

STUDY = Study(Config, run)
