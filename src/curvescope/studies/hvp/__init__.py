"""What a product costs: time in gradients, memory, the first call, and how far it is from float64."""

from curvescope.runs.study import Study
from curvescope.studies.hvp.study import Config, Cost, Measured, run

__all__ = ["STUDY", "Config", "Cost", "Measured", "run"]

STUDY = Study(Config, run)
