"""Interactive figures as plotly's JSON: functions from arrays to a `Scene` of plain dictionaries. Scenes
set no background or text colors, because the page may be light or dark.
"""

from curvescope.viz.scenes.curves import Curve, curves, in_interval, said, switched
from curvescope.viz.scenes.maps import Cell, grid_map, layer_map

__all__ = ["Cell", "Curve", "curves", "grid_map", "in_interval", "layer_map", "said", "switched"]
