"""Embedding of a model: its distance from its normalized form, and its extreme tokens."""

from curvescope.runs.study import Study
from curvescope.studies.embeddings.study import Config, Counts, Embeddings, run

__all__ = ["STUDY", "Config", "Counts", "Embeddings", "run"]

STUDY = Study(Config, run)
