"""How sharply the loss bends in every token's state, at every point of the stream."""

from curvescope.runs.study import Study
from curvescope.studies.activations.analysis import TokenCurvature, token_curvature
from curvescope.studies.activations.study import Activations, Config, run

__all__ = ["STUDY", "Activations", "Config", "TokenCurvature", "run", "token_curvature"]

STUDY = Study(Config, run)
