"""Where curvature comes from: the Hessian as a sum over norms, attentions and feed-forward networks."""

from curvescope.runs.study import Study
from curvescope.studies.propagation.analysis import Shares
from curvescope.studies.propagation.study import PLAN, Config, Propagation, measure, run

__all__ = ["STUDY", "Config", "Propagation", "Shares", "measure", "run"]

STUDY = Study(Config, run, PLAN)
