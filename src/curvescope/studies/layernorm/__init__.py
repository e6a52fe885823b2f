"""What the norms of a model do: a sphere, an ellipsoid, its place, and keys that no query can prefer."""

from curvescope.studies.layernorm.study import Config, LayerNorms, NormShape, run

__all__ = ["Config", "LayerNorms", "NormShape", "run"]
