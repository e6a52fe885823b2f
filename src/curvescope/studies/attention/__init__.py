"""Time and memory of derivatives of attention, compared with PyTorch's math path and others."""

from curvescope.runs.study import Study
from curvescope.studies.attention.cost import Cost, Timed
from curvescope.studies.attention.study import Config, run

__all__ = ["STUDY", "Config", "Cost", "Timed", "run"]

STUDY = Study(Config, run)
