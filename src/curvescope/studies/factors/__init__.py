"""K-FAC and similar factorizations over training: distance from the exact curvature, quality of a step."""

from curvescope.runs.study import Study
from curvescope.studies.factors.study import FULL, Config, Factors, run

__all__ = ["STUDY", "Config", "Factors", "run"]

STUDY = Study(Config, run, full=FULL)
