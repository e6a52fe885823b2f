"""Which training sequences moved a prediction: influence by exact inverse products, against retraining."""

from curvescope.runs.study import Study
from curvescope.studies.influence.plan import PLAN
from curvescope.studies.influence.scores import Scores, score
from curvescope.studies.influence.study import Config, Influence, run

__all__ = ["STUDY", "Config", "Influence", "Scores", "run", "score"]

STUDY = Study(Config, run, PLAN)
