"""Study of attention sinks: their location, and changes of the spectrum as they grow."""

from curvescope.runs.study import Study
from curvescope.studies.sinks.analysis import RitzLines, SinkBlocks, SinkHeads, SinkSpectra
from curvescope.studies.sinks.study import PLAN, Config, Sinks, measure, prepare, run

__all__ = [
    "STUDY",
    "Config",
    "RitzLines",
    "SinkBlocks",
    "SinkHeads",
    "SinkSpectra",
    "Sinks",
    "measure",
    "prepare",
    "run",
]

STUDY = Study(Config, run, PLAN)
