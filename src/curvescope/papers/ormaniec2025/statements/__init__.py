"""Statements and exponents of the paper and its slides, each checked in closed form."""

from curvescope.papers.ormaniec2025.statements.study import Config, Statements, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "Config", "Statements", "run"]

STUDY = Study(Config, run)
