"""The published curves of |L_{k+1} − L_k| with their own kinds of networks (E4, E7, E8), beside controls."""

from curvescope.papers.petrov2025.convergence.study import Config, Convergence, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "Config", "Convergence", "run"]

STUDY = Study(Config, run)
