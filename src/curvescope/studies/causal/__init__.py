"""Steering and ablation along directions of the weights, and attribution of the logits."""

from curvescope.runs.study import Study
from curvescope.studies.causal.study import Causal, Config, run

__all__ = ["STUDY", "Causal", "Config", "run"]

STUDY = Study(Config, run)
