"""Study of normalization layers: the ellipsoid of their outputs, and keys that no query can select."""

from curvescope.runs.study import Study
from curvescope.studies.layernorm.study import Config, LayerNorms, NormShape, run

__all__ = ["STUDY", "Config", "LayerNorms", "NormShape", "run"]

STUDY = Study(Config, run)
