"""What rounding of weights to few bits does to the loss, as predicted by curvature and as measured."""

from curvescope.runs.study import Study
from curvescope.studies.quantize.analysis import Roundings
from curvescope.studies.quantize.study import Config, Quantized, run

__all__ = ["STUDY", "Config", "Quantized", "Roundings", "run"]

STUDY = Study(Config, run)
