"""The heads of a model as matrices: what their queries look for, what their values write, what they feed."""

from curvescope.runs.study import Study
from curvescope.studies.heads.study import Config, Heads, run

__all__ = ["STUDY", "Config", "Heads", "run"]

STUDY = Study(Config, run)
