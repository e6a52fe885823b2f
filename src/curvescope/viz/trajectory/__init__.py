"""Figures of paths through the layers, with names beside their points."""

from curvescope.viz.trajectory.figures import (
    depth_curve,
    path_grid,
    path_scene,
    share_bars,
    short,
    single_path,
    token_map,
)

__all__ = ["depth_curve", "path_grid", "path_scene", "share_bars", "short", "single_path", "token_map"]
