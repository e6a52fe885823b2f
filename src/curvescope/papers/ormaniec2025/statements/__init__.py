"""What the paper and its slides state in words and exponents, each checked in closed form."""

from curvescope.papers.ormaniec2025.statements.study import Config, Statements, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "Config", "Statements", "run"]

STUDY = Study(Config, run)
