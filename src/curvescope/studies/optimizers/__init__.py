"""Study that compares curvature-aware optimizers with SGD and AdamW at equal steps, work and time."""

from curvescope.runs.study import Study
from curvescope.studies.optimizers.analysis import TrainingRun
from curvescope.studies.optimizers.study import FULL, Config, OptimizerComparison, merge, run

__all__ = ["STUDY", "Config", "OptimizerComparison", "TrainingRun", "merge", "run"]

STUDY = Study(Config, run, full=FULL)
