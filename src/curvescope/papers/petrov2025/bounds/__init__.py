"""Theorems 1 and 6, the estimates of their proofs, and the precursor's bound, next to the truth."""

from curvescope.papers.petrov2025.bounds.study import ClaimedBounds, Config, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "ClaimedBounds", "Config", "run"]

STUDY = Study(Config, run)
