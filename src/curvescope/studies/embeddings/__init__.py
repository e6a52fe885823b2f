"""The embedding of a model: how near it is to its normalised form, and which tokens are its extremes."""

from curvescope.studies.embeddings.study import Config, Counts, Embeddings, run

__all__ = ["Config", "Counts", "Embeddings", "run"]
