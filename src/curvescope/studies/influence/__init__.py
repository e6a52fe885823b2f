"""Influence of training sequences on predictions: exact inverse products, compared with retraining."""

from curvescope.runs.study import Study
from curvescope.studies.influence.analysis import Scores, score
from curvescope.studies.influence.study import PLAN, Config, Influence, run

__all__ = ["STUDY", "Config", "Influence", "Scores", "run", "score"]

STUDY = Study(Config, run, PLAN)
