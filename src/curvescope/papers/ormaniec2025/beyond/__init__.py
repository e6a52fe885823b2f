"""Beyond the published sweeps: every block, every pair of blocks, of any zoo Transformer."""

from curvescope.papers.ormaniec2025.beyond.study import Beyond, Config, Scale, run

__all__ = ["Beyond", "Config", "Scale", "run"]
