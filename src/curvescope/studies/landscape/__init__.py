"""The loss landscape as the sample grows: increments beside their control, exact laws, bounds, budgets."""

from curvescope.runs.study import Study
from curvescope.studies.landscape.study import PLAN, Config, Landscape, run

__all__ = ["STUDY", "Config", "Landscape", "run"]

STUDY = Study(Config, run, PLAN)
