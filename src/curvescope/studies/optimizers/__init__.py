"""Optimizers that use curvature beside SGD and AdamW, at equal steps, work and time."""

from curvescope.runs.study import Study
from curvescope.studies.optimizers.analysis import Course
from curvescope.studies.optimizers.study import FULL, Compared, Config, merge, run

__all__ = ["STUDY", "Compared", "Config", "Course", "merge", "run"]

STUDY = Study(Config, run, full=FULL)
