"""Growth: norms of blocks against the scale of the embeddings, in every setting of the paper."""

from curvescope.papers.ormaniec2025.growth.study import Config, Growth, Points, Sweep, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "Config", "Growth", "Points", "Sweep", "run"]

STUDY = Study(Config, run)
