"""The histograms: sizes of the entries of the W_Q and W_V blocks, with softmax and without."""

from curvescope.papers.ormaniec2025.histograms.study import Bars, Config, Histograms, run

__all__ = ["Bars", "Config", "Histograms", "run"]
