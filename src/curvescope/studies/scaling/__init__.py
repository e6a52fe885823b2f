"""How loss and curvature change with model size and data size, and which power laws a grid supports."""

from curvescope.runs.study import Study
from curvescope.studies.scaling.analysis import Cell, Law, Needed, fit_law, plan_data
from curvescope.studies.scaling.study import Config, Scaling, run

__all__ = ["STUDY", "Cell", "Config", "Law", "Needed", "Scaling", "fit_law", "plan_data", "run"]

STUDY = Study(Config, run)
