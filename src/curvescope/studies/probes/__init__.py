"""Words as probes of heads: which keys a word's query looks for, and what its value writes."""

from curvescope.runs.study import Study
from curvescope.studies.probes.study import Config, Probes, run

__all__ = ["STUDY", "Config", "Probes", "run"]

STUDY = Study(Config, run)
