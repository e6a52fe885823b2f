"""How loss and curvature change with model size and data size, and which power laws a grid supports."""

from curvescope.runs.study import Study
from curvescope.studies.scaling.cell import Cell
from curvescope.studies.scaling.laws import Law, fit_law
from curvescope.studies.scaling.needed import Needed, plan_data
from curvescope.studies.scaling.setting import Config
from curvescope.studies.scaling.study import Scaling, run

__all__ = ["STUDY", "Cell", "Config", "Law", "Needed", "Scaling", "fit_law", "plan_data", "run"]

STUDY = Study(Config, run)
