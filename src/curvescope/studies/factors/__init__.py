"""K-FAC and its friends over training: how far from the true curvature, and what that says of a step."""

from curvescope.runs.study import Study
from curvescope.studies.factors.study import FULL, Config, Factors, run

__all__ = ["STUDY", "Config", "Factors", "run"]

STUDY = Study(Config, run, full=FULL)
