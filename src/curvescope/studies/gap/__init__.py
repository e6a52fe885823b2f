"""Error of the GGN as an approximation of H: λ_max, trace, norm and density, per block, over training."""

from curvescope.runs.study import Study
from curvescope.studies.gap.analysis import Draws, Pair
from curvescope.studies.gap.study import PLAN, Config, Gap, measure, run

__all__ = ["STUDY", "Config", "Draws", "Gap", "Pair", "measure", "run"]

STUDY = Study(Config, run, PLAN, on_pieces=True)
