"""Study of the loss landscape as the sample grows: increments, a control, exact laws, bounds and budgets."""

from curvescope.runs.study import Study
from curvescope.studies.landscape.study import PLAN, Config, Landscape, run

__all__ = ["STUDY", "Config", "Landscape", "run"]

STUDY = Study(Config, run, PLAN)
