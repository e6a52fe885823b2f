"""The whole Hessian of a one-block vision Transformer, written out, before and after training."""

from curvescope.runs.study import Study
from curvescope.studies.full_hessian.dense import Dense
from curvescope.studies.full_hessian.norms import Norms
from curvescope.studies.full_hessian.settings import Config
from curvescope.studies.full_hessian.study import FullHessian, Network, run
from curvescope.studies.full_hessian.training import Trained

__all__ = ["STUDY", "Config", "Dense", "FullHessian", "Network", "Norms", "Trained", "run"]

STUDY = Study(Config, run)
