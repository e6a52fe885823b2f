"""The heat map: every entry of the Hessian of a small Transformer, and of its attention."""

from curvescope.papers.ormaniec2025.heatmap import Columns, Config, HeatMap, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "Columns", "Config", "HeatMap", "run"]

STUDY = Study(Config, run)
