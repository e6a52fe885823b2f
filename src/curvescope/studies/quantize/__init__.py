"""Study of quantization: the effect of rounding weights to few bits, predicted by curvature and measured."""

from curvescope.runs.study import Study
from curvescope.studies.quantize.study import Config, Quantized, Roundings, run

__all__ = ["STUDY", "Config", "Quantized", "Roundings", "run"]

STUDY = Study(Config, run)
