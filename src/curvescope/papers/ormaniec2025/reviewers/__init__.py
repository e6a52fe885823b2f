"""Questions of the reviewers: depth, residual, other networks, range of σ, W_QK, gradient, softmax."""

from curvescope.papers.ormaniec2025.reviewers.networks import Config
from curvescope.papers.ormaniec2025.reviewers.study import Reviewers, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "Config", "Reviewers", "run"]

STUDY = Study(Config, run)
