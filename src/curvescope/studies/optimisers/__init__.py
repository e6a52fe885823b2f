"""Optimisers that use curvature beside SGD and AdamW, at equal steps, work and time."""

from curvescope.runs.study import Study
from curvescope.studies.optimisers.course import Course
from curvescope.studies.optimisers.study import Compared, Config, run

__all__ = ["STUDY", "Compared", "Config", "Course", "run"]

STUDY = Study(Config, run)
