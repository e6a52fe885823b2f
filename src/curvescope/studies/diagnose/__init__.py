"""Diagnosis of a model: findings with numbers, worst first."""

from curvescope.runs.study import Study
from curvescope.studies.diagnose.checks import Finding
from curvescope.studies.diagnose.study import PLAN, Config, Diagnosis, diagnose, run

__all__ = ["STUDY", "Config", "Diagnosis", "Finding", "diagnose", "run"]

STUDY = Study(Config, run, PLAN)
