"""Optimisers that use curvature beside SGD and AdamW, at equal steps, work and time."""

from curvescope.runs.study import Study
from curvescope.studies.optimisers.analysis import Course
from curvescope.studies.optimisers.study import FULL, Compared, Config, merge, run

__all__ = ["STUDY", "Compared", "Config", "Course", "merge", "run"]

STUDY = Study(Config, run, full=FULL)
