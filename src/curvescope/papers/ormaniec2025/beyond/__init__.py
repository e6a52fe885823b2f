"""Beyond the published sweeps: every block, every pair of blocks, of any zoo Transformer."""

from curvescope.papers.ormaniec2025.beyond import Beyond, Config, Scale, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "Beyond", "Config", "Scale", "run"]

STUDY = Study(Config, run)
