"""Study of words as probes of attention heads: the keys their queries match, and the tokens their values
write.
"""

from curvescope.runs.study import Study
from curvescope.studies.probes.study import Config, Probes, run

__all__ = ["STUDY", "Config", "Probes", "run"]

STUDY = Study(Config, run)
