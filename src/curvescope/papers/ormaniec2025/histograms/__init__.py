"""The histograms: sizes of the entries of the W_Q and W_V blocks, with softmax and without."""

from curvescope.papers.ormaniec2025.histograms import Bars, Config, Histograms, run
from curvescope.runs.study import Study

__all__ = ["STUDY", "Bars", "Config", "Histograms", "run"]

STUDY = Study(Config, run)
