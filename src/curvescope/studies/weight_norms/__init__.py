"""Study of λ_max against spectral and Frobenius norms of weight matrices, over training and random models."""

from curvescope.algorithms.estimates.ranks import Correlation, rank_correlation
from curvescope.runs.study import Study
from curvescope.studies.weight_norms.study import Config, RandomModels, TrainedBlocks, WeightNorms, run

__all__ = [
    "STUDY", "Config", "Correlation", "RandomModels", "TrainedBlocks", "WeightNorms", "rank_correlation",
    "run",
]  # fmt: skip

STUDY = Study(Config, run)
