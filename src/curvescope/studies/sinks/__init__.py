"""Attention sinks: where they are, and how the spectrum moves as they grow."""

from curvescope.runs.study import Study
from curvescope.studies.sinks.heads import Heads
from curvescope.studies.sinks.lines import Lines
from curvescope.studies.sinks.moved import Blocks, Moved
from curvescope.studies.sinks.plan import PLAN
from curvescope.studies.sinks.study import Config, Sinks, measure, prepare, run

__all__ = ["STUDY", "Blocks", "Config", "Heads", "Lines", "Moved", "Sinks", "measure", "prepare", "run"]

STUDY = Study(Config, run, PLAN)
