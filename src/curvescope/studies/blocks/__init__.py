"""The blocks of a model, layer × role: trace, norms, extreme eigenvalues and density of each."""

from curvescope.studies.blocks.study import Blocks, Config, Part, run

__all__ = ["Blocks", "Config", "Part", "run"]
