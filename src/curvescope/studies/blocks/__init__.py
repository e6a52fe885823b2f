"""The blocks of a model, layer × role: trace, norms, extreme eigenvalues and density of each."""

from curvescope.runs.study import Study
from curvescope.studies.blocks.plan import PLAN
from curvescope.studies.blocks.study import Blocks, Config, Part, run

__all__ = ["STUDY", "Blocks", "Config", "Part", "run"]

STUDY = Study(Config, run, PLAN)
