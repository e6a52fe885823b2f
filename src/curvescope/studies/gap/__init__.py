"""How well the GGN stands for the Hessian: λ_max, trace, norm and density, block by block, over training."""

from curvescope.runs.study import Study
from curvescope.studies.gap.pair import Pair
from curvescope.studies.gap.plan import PLAN
from curvescope.studies.gap.study import Config, Gap, measure, run
from curvescope.studies.gap.targets import Draws

__all__ = ["STUDY", "Config", "Draws", "Gap", "Pair", "measure", "run"]

STUDY = Study(Config, run, PLAN, on_pieces=True)
