"""Names beside points in two or three dimensions: where there is room, and left out where there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

MARKER = 3.5  # points from the middle of a marker to its edge
DISTANCES = (4.5, 13.0)  # points from a marker to its name, the nearer ones first; far ones get a line
Box = tuple[float, float, float, float]
"""Left, lower, right and upper edge, in points."""
SIDES = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))


class Names(NamedTuple):
    """Points (n, 2) or (n, 3) with a name each."""

    points: np.ndarray
    names: Sequence[str]
    color: str
    size: float


class Marks(NamedTuple):
    """What names should not cover: points (n, 2) or (n, 3), drawn so large."""

    points: np.ndarray
    radius: float = MARKER  # in points of the paper


def name_points(
    ax: Any,
    groups: Sequence[Names],
    *,
    clear: Sequence[Marks],
    distances: Sequence[float] = DISTANCES,
) -> None:
    """Write the names of every group beside their points, the first group first.

    A name lies on no other, on none of the marks, and not outside the figure. One that finds no such place
    is left out. Call it when the axes have their limits, their view and their place in the figure.

    Args:
        distances: from a marker to its name, in points, the nearer ones first; far ones get a line.
    """
    taken = [_around(middle, mark.radius) for mark in clear for middle in _on_paper(ax, mark.points)]
    width, height = (72 * inches for inches in ax.figure.get_size_inches())
    for group in groups:
        for middle, name in zip(_on_paper(ax, group.points), group.names, strict=True):
            size = _size_of(name, group.size)
            for box, offset, far in _places(middle, size, distances):
                inside = box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height
                if inside and not _touches(box, np.array(taken)):
                    _write(ax, name, middle, offset, far, group)
                    taken.append(box)
                    break


def along(path: np.ndarray, num_points: int = 12) -> np.ndarray:
    """Points (m, 3) on the straight lines between those of a path (n, 3): what a name should not cover."""
    shares = np.linspace(0, 1, num_points, endpoint=False)[:, None]
    parts = [a + shares * (b - a) for a, b in pairwise(path)]
    return np.concatenate([*parts, path[-1:]])


def _on_paper(ax: Any, points: np.ndarray) -> np.ndarray:
    """(n, 2) where points (n, 2) or (n, 3) lie in the figure, in points from its lower left corner."""
    ax.apply_aspect()
    if points.shape[1] == 3:
        from mpl_toolkits.mplot3d import proj3d

        x, y, z = points.T
        x, y, _ = proj3d.proj_transform(x, y, z, ax.get_proj())
        points = np.column_stack([x, y])
    pixels = ax.transData.transform(points)
    return pixels * 72 / ax.figure.dpi


def _size_of(name: str, size: float) -> tuple[float, float]:
    """Width and height of a name, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(name, FontProperties(size=size), ismath=False)
    return width + 1, size


def _places(
    middle: np.ndarray, size: tuple[float, float], distances: Sequence[float]
) -> Iterator[tuple[Box, tuple[float, float], bool]]:
    """Boxes for a name around a point, the best first, the way to their middle, and whether it is far."""
    for distance in distances:
        for right, up in SIDES:
            reach = distance if right == 0 or up == 0 else distance / 2**0.5
            offset = (right * (reach + size[0] / 2), up * (reach + size[1] / 2))
            x, y = middle + offset
            box = (x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2)
            yield box, offset, distance > distances[0]


def _around(middle: np.ndarray, radius: float) -> Box:
    x, y = middle
    return (x - radius, y - radius, x + radius, y + radius)


def _touches(box: Box, others: np.ndarray) -> bool:
    """Whether a box overlaps one of the others (n, 4)."""
    left, lower, right, upper = others.reshape(-1, 4).T
    return bool(((box[0] < right) & (left < box[2]) & (box[1] < upper) & (lower < box[3])).any())


def _write(
    ax: Any, name: str, middle: np.ndarray, offset: tuple[float, float], far: bool, group: Names
) -> None:
    """A name whose middle is `offset` away from a point, with a thin line to it where it is far."""
    place = ax.transData.inverted().transform(middle * ax.figure.dpi / 72)
    line = {"arrowstyle": "-", "lw": 0.4, "color": group.color, "shrinkA": 0, "shrinkB": MARKER}
    ax.annotate(
        name, place, offset, textcoords="offset points", ha="center", va="center", fontsize=group.size,
        color=group.color, annotation_clip=False, arrowprops=line if far else None,
    )  # fmt: skip
