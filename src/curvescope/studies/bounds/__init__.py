"""How far bounds of the Hessian are from the truth: published ones, corrected ones, and where they fail."""

from curvescope.runs.study import Study
from curvescope.studies.bounds.analysis import Comparisons
from curvescope.studies.bounds.study import Bounds, Config, run

__all__ = ["STUDY", "Bounds", "Comparisons", "Config", "run"]

STUDY = Study(Config, run)
