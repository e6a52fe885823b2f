"""Do directions of weights do what they say? Steered and ablated along, and what the logits are made of."""

from curvescope.runs.study import Study
from curvescope.studies.causal.study import Causal, Config, run

__all__ = ["STUDY", "Causal", "Config", "run"]

STUDY = Study(Config, run)
