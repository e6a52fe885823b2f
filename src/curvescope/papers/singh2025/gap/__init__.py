"""How far the GGN is from the Hessian: Transformers and MLPs of one size, training, other targets."""

from curvescope.papers.singh2025.gap.courses import Course
from curvescope.papers.singh2025.gap.study import Config, Gaps, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "Config", "Course", "Gaps", "run"]

STUDY = Study(Config, run)
