"""What the norms of a model do: a sphere, an ellipsoid, its place, and keys that no query can prefer."""

from curvescope.runs.study import Study
from curvescope.studies.layernorm.study import Config, LayerNorms, NormShape, run

__all__ = ["STUDY", "Config", "LayerNorms", "NormShape", "run"]

STUDY = Study(Config, run)
