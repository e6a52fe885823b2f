"""How far a Taylor expansion carries: along lines, on a plane, and along gradient descent."""

from curvescope.runs.study import Study
from curvescope.studies.taylor.analysis import Descent, Settled
from curvescope.studies.taylor.study import PLAN, Config, Taylor, run

__all__ = ["STUDY", "Config", "Descent", "Settled", "Taylor", "run"]

STUDY = Study(Config, run, PLAN)
