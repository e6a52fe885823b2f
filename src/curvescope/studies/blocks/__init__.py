"""The blocks of a model, layer × role: trace, norms, extreme eigenvalues and density of each."""

from curvescope.studies.blocks.part import Part
from curvescope.studies.blocks.study import Blocks, Config, run

__all__ = ["Blocks", "Config", "Part", "run"]
