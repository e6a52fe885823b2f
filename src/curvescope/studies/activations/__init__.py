"""Curvature of the loss in the activations of every token, at every point of the residual stream."""

from curvescope.runs.study import Study
from curvescope.studies.activations.study import Activations, Config, TokenCurvature, run, token_curvature

__all__ = ["STUDY", "Activations", "Config", "TokenCurvature", "run", "token_curvature"]

STUDY = Study(Config, run)
