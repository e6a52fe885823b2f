"""Drawing: arrays in, matplotlib Axes out. Nothing here computes, and matplotlib is imported on first use."""

from curvescope.viz import attention, blocks, spectrum, style

__all__ = ["attention", "blocks", "spectrum", "style"]
