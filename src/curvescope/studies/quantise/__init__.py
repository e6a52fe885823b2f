"""What rounding of weights to few bits does to the loss, as predicted by curvature and as measured."""

from curvescope.runs.study import Study
from curvescope.studies.quantise.analysis import Roundings
from curvescope.studies.quantise.study import Config, Quantised, run

__all__ = ["STUDY", "Config", "Quantised", "Roundings", "run"]

STUDY = Study(Config, run)
