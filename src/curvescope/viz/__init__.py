"""Drawing: arrays in, matplotlib Axes out. Nothing here computes, and matplotlib is imported on first use."""

from curvescope.viz import blocks, matrix, spectrum, style

__all__ = ["blocks", "matrix", "spectrum", "style"]
