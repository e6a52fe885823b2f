"""Study of the sources of curvature: the Hessian as a sum over norms, attention and feed-forward networks."""

from curvescope.runs.study import Study
from curvescope.studies.propagation.study import PLAN, Config, Propagation, Shares, measure, run

__all__ = ["STUDY", "Config", "Propagation", "Shares", "measure", "run"]

STUDY = Study(Config, run, PLAN)
