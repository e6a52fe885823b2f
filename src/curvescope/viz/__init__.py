"""Drawing functions from arrays to matplotlib Axes; they compute nothing and import matplotlib late."""

from curvescope.viz import blocks, matrix, spectrum, style

__all__ = ["blocks", "matrix", "spectrum", "style"]
