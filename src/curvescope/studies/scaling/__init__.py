"""Study of scaling: loss and curvature against model size and data size, with tested power laws."""

from curvescope.runs.study import Study
from curvescope.studies.scaling.analysis import GridCell, NeededSamples, PowerLaw, fit_law, plan_data
from curvescope.studies.scaling.study import Config, Scaling, run

__all__ = [
    "STUDY",
    "Config",
    "GridCell",
    "NeededSamples",
    "PowerLaw",
    "Scaling",
    "fit_law",
    "plan_data",
    "run",
]

STUDY = Study(Config, run)
