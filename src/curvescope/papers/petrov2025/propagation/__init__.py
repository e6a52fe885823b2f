"""Propagation: curvature across depth, norm placement, width and training, and with parts switched off."""

from curvescope.papers.petrov2025.propagation.study import Config, Spectrum, Sweeps, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "Config", "Spectrum", "Sweeps", "run"]

STUDY = Study(Config, run)
