"""Study of the range of Taylor expansions: along lines, on a plane, and along gradient descent."""

from curvescope.runs.study import Study
from curvescope.studies.taylor.analysis import DescentRun, Settled
from curvescope.studies.taylor.study import PLAN, Config, Taylor, run

__all__ = ["STUDY", "Config", "DescentRun", "Settled", "Taylor", "run"]

STUDY = Study(Config, run, PLAN)
