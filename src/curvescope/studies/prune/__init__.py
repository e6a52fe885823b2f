"""Study of pruning: the effect of removing weights on the loss, predicted by curvature and measured."""

from curvescope.runs.study import Study
from curvescope.studies.prune.analysis import HeadRemovals, RemovalSamples, RemovalSets
from curvescope.studies.prune.study import Config, Pruned, run

__all__ = ["STUDY", "Config", "HeadRemovals", "Pruned", "RemovalSamples", "RemovalSets", "run"]

STUDY = Study(Config, run)
