"""Bounds of the Hessian norm, published and corrected, compared with the exact norms."""

from curvescope.runs.study import Study
from curvescope.studies.bounds.analysis import Comparisons
from curvescope.studies.bounds.study import Bounds, Config, run

__all__ = ["STUDY", "Bounds", "Comparisons", "Config", "run"]

STUDY = Study(Config, run)
