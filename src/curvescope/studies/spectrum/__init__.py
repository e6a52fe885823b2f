"""The spectrum of a model: density, extreme eigenvalues, traces and norms of every block."""

from curvescope.runs.study import Study
from curvescope.studies.spectrum.study import PLAN, Config, Part, Spectrum, run

__all__ = ["STUDY", "Config", "Part", "Spectrum", "run"]

STUDY = Study(Config, run, PLAN, on_pieces=True)
