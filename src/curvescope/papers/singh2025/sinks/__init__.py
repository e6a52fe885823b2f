"""Sinks: what the slides say of attention sinks, on models that are trained or not, with norms or without."""

from curvescope.papers.singh2025.sinks.study import Config, SinkCases, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "Config", "SinkCases", "run"]

STUDY = Study(Config, run)
