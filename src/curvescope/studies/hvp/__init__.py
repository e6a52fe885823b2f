"""Cost of a Hessian-vector product: time in gradients, memory, first call, and error against float64."""

from curvescope.runs.study import Study
from curvescope.studies.hvp.study import Config, Cost, Measured, run

__all__ = ["STUDY", "Config", "Cost", "Measured", "run"]

STUDY = Study(Config, run)
