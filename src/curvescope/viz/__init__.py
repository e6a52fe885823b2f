"""Drawing functions from arrays to matplotlib Axes. They compute nothing; matplotlib is imported on first
use.
"""

from curvescope.viz import blocks, matrix, spectrum, style

__all__ = ["blocks", "matrix", "spectrum", "style"]
