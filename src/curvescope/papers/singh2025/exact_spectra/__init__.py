"""What the slides say about exact spectra, Gauss–Newton matrices and pairs, next to what comes out."""

from curvescope.papers.singh2025.exact_spectra.study import ClaimedSpectra, Config, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "ClaimedSpectra", "Config", "run"]

STUDY = Study(Config, run)
