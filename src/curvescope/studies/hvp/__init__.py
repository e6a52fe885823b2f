"""What a product costs: time in gradients, memory, the first call, and how far it is from float64."""

from curvescope.studies.hvp.study import Config, Cost, Measured, run

__all__ = ["Config", "Cost", "Measured", "run"]
