"""Exact spectra of the smallest networks, how they move, and what is left of it all in larger ones."""

from curvescope.runs.study import Study
from curvescope.studies.exact_spectra.study import Config, ExactSpectra, run

__all__ = ["STUDY", "Config", "ExactSpectra", "run"]

STUDY = Study(Config, run)
