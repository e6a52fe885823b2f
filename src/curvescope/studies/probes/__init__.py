"""Words as probes of attention heads: keys that their queries match, tokens that their values write."""

from curvescope.runs.study import Study
from curvescope.studies.probes.study import Config, Probes, run

__all__ = ["STUDY", "Config", "Probes", "run"]

STUDY = Study(Config, run)
