"""The embedding of a model: how near it is to its normalized form, and which tokens are its extremes."""

from curvescope.runs.study import Study
from curvescope.studies.embeddings.study import Config, Counts, Embeddings, run

__all__ = ["STUDY", "Config", "Counts", "Embeddings", "run"]

STUDY = Study(Config, run)
