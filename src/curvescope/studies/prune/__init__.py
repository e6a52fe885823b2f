"""What the removal of weights does to the loss, as predicted by curvature and as measured."""

from curvescope.runs.study import Study
from curvescope.studies.prune.analysis import Heads, Samples, Sets
from curvescope.studies.prune.study import Config, Pruned, run

__all__ = ["STUDY", "Config", "Heads", "Pruned", "Samples", "Sets", "run"]

STUDY = Study(Config, run)
