"""Full Hessian matrix of a one-block Vision Transformer, before and after training."""

from curvescope.runs.study import Study
from curvescope.studies.full_hessian.analysis import Dense, Norms, Trained
from curvescope.studies.full_hessian.study import Config, FullHessian, Network, run

__all__ = ["STUDY", "Config", "Dense", "FullHessian", "Network", "Norms", "Trained", "run"]

STUDY = Study(Config, run)
