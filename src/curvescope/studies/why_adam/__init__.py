"""Study of why Adam beats SGD: the gap between tuned optimizers, and the heterogeneity of curvature."""

from curvescope.runs.study import Study
from curvescope.studies.why_adam.study import Config, WhyAdam, run

__all__ = ["STUDY", "Config", "WhyAdam", "run"]

STUDY = Study(Config, run)
