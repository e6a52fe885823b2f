"""Interactive figures as plotly's JSON, made of plain dictionaries: arrays in, a `Scene` out.

No scene has a color of its ground or of its letters: the page that shows it is light or dark.
"""

from curvescope.viz.scenes.curves import Curve, curves, estimated, said, switched
from curvescope.viz.scenes.maps import Cell, grid_map, layer_map

__all__ = ["Cell", "Curve", "curves", "estimated", "grid_map", "layer_map", "said", "switched"]
