"""Exact spectra of the smallest networks, how they change, and how much of this holds in larger networks."""

from curvescope.runs.study import Study
from curvescope.studies.exact_spectra.study import Config, ExactSpectra, run

__all__ = ["STUDY", "Config", "ExactSpectra", "run"]

STUDY = Study(Config, run)
