"""Attention sinks: where they are, and how the spectrum moves as they grow."""

from curvescope.runs.study import Study
from curvescope.studies.sinks.analysis import Blocks, Heads, Lines, Moved
from curvescope.studies.sinks.study import PLAN, Config, Sinks, measure, prepare, run

__all__ = ["STUDY", "Blocks", "Config", "Heads", "Lines", "Moved", "Sinks", "measure", "prepare", "run"]

STUDY = Study(Config, run, PLAN)
