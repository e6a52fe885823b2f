"""Growth: norms of blocks against the scale of the embeddings, in every setting of the paper."""

from curvescope.papers.ormaniec2025.growth.study import Config, Growth, Points, Sweep, run

__all__ = ["Config", "Growth", "Points", "Sweep", "run"]
