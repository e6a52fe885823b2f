"""The blocks of a model, layer × role: trace, norms, extreme eigenvalues and density of each."""

from curvescope.runs.study import Study
from curvescope.studies.blocks.analysis import Part
from curvescope.studies.blocks.study import PLAN, Blocks, Config, run

__all__ = ["STUDY", "Blocks", "Config", "Part", "run"]

STUDY = Study(Config, run, PLAN, on_pieces=True)
